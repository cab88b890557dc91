"""Linformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import Capability, Cost, MechanismConfig, Paper, Shape
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.whole_sequence import ENCODER, WholeSequence

SHARING = {"none": (None, 2), "heads": (1, 2), "keys_values": (1, 1)}
"""Sets of projections (None is one a head) and kinds, for keys and for values or for both."""


class Linformer(WholeSequence):
    """Keys and values are projected along the length to a fixed number of rows, so time is linear in it.

    Every row is a mixture of all tokens: there is no causal form. The paper's sharing between layers is a model's.
    """

    name = "linformer"
    summary = "keys and values are projected along the length to a fixed number of rows"
    paper = Paper(
        title="Linformer: Self-Attention with Linear Complexity", authors="Wang et al.", year=2020, arxiv="2006.04768"
    )
    equation = (
        r"o = \mathrm{softmax}\left(\frac{Q (E^\top K)^\top}{\sqrt{d}}\right) F^\top V,\quad E, F \in R^{n \times k}"
    )
    sketch: ClassVar = {"rank": 4}
    capabilities = ENCODER | {Capability.EXACT}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`rank` k rows; `length` n is the longest sequence, by default the model's context, without one 512;
        `sharing` of E and F: "none" (each head its own), "heads" or "keys_values" (one for all)."""

        rank: int = 128
        length: int | None = None
        sharing: str = "heads"

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("rank", self.rank, "rows")
            if self.length is not None:
                check_whole("length", self.length, "tokens")
            if self.sharing not in SHARING:
                raise InvalidValue.of("sharing", self.sharing, ", ".join(SHARING))

    def attention(self, config: MechanismConfig) -> Any:
        """Fresh projections of the length."""
        from attn_variants.mechanisms.low_rank.layers import LengthProjection

        sets, kinds = SHARING[self.Config.of(config).sharing]
        return LengthProjection(
            length=length_of(config), rank=self.Config.of(config).rank, sets=sets or config.heads, kinds=kinds
        )

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Projections of the width, of the length, and the pairs of queries and rows."""
        heads, size = self.inner_size(config)
        rank, (sets, kinds) = self.Config.of(config).rank, SHARING[self.Config.of(config).sharing]
        flops = self.projected(config, shape) + 8 * shape.batch * heads * shape.query * rank * size
        weights = self.weights(config) + kinds * (sets or heads) * length_of(config) * rank
        return Cost(flops=flops, allowed_flops=flops, parameters=weights)


def length_of(config: MechanismConfig) -> int:
    """The longest sequence."""
    return Linformer.Config.of(config).length or config.context or 512
