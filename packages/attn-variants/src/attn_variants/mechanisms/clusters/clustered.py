"""Clustered attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import Cost, MechanismConfig, Paper, Shape
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.whole_sequence import ENCODER, WholeSequence


class ClusteredAttention(WholeSequence):
    """Queries that point the same way attend once, as one; their best keys are then weighed by each itself.

    Groups are found over the whole sequence: there is no causal form. With as many groups as queries it is softmax
    attention.
    """

    name = "clustered"
    summary = "groups of like queries attend as one, and each query weighs the best keys itself"
    paper = Paper(
        title="Fast Transformers with Clustered Attention", authors="Vyas et al.", year=2020, arxiv="2007.04825"
    )
    equation = (
        r"A^c_j = \mathrm{softmax}_j\left(\frac{\bar q_c^\top k_j}{\sqrt{d}}\right),\quad"
        r" o_i = \sum_{j \notin T_c} A^c_j v_j + m_c \sum_{j \in T_c}"
        r" \mathrm{softmax}_{j \in T_c}\left(\frac{q_i^\top k_j}{\sqrt{d}}\right) v_j,"
        r"\quad m_c = \sum_{j \in T_c} A^c_j"
    )
    sketch: ClassVar = {"clusters": 3, "top": 2}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`clusters` C; `bits` of the codes that are grouped, in `iterations` of Lloyd's algorithm; the `top` keys T
        that are weighed anew, 0 for none; the `seed` of the codes."""

        clusters: int = 64
        bits: int = 63
        iterations: int = 10
        top: int = 32
        seed: int = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("clusters", "bits", "iterations"):
                check_whole(name, getattr(self, name), name)
            if self.top != 0:
                check_whole("top", self.top, "keys")
            if not isinstance(self.seed, int):
                raise InvalidValue.of("seed", self.seed, "a whole number")

    def attention(self, config: MechanismConfig) -> Any:
        """Groups of queries, and their best keys."""
        from attn_variants.mechanisms.clusters.layers import Clustered

        heads, options = config.head_layout, self.Config.of(config)
        return Clustered(
            size=heads.key_size,
            clusters=options.clusters,
            bits=options.bits,
            iterations=options.iterations,
            top=options.top,
            seed=options.seed,
        )

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Codes, the search for groups, keys that meet groups, and best keys that meet queries."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        groups, tokens, top = options.clusters, shape.query, min(options.top, shape.query)
        search = tokens * size * options.bits + (options.iterations + 1) * tokens * groups * options.bits
        attend = 2 * groups * tokens * size + groups * top * size + 2 * tokens * top * size
        flops = self.projected(config, shape) + 2 * shape.batch * heads * (search + attend)
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))
