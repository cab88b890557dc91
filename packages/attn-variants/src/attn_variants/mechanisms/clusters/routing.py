"""Routing attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import Cost, MechanismConfig, Paper, Shape
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.whole_sequence import ENCODER, WholeSequence


class RoutingAttention(WholeSequence):
    """Tokens near a centroid attend to each other; centroids are found by k-means while training.

    A cluster takes the nearest of all tokens, so that a later token may push out an earlier one: no causal form is
    offered. With one cluster as wide as the sequence it is softmax attention.
    """

    name = "routing"
    summary = "tokens near a learned centroid attend to each other"
    paper = Paper(
        title="Efficient Content-Based Sparse Attention with Routing Transformers",
        authors="Roy et al.",
        year=2021,
        arxiv="2003.05997",
    )
    equation = (
        r"o_i = \frac{1}{|C_i|} \sum_{c \in C_i} \sum_{j \in T_c}"
        r" \mathrm{softmax}_j\left(\frac{q_i^\top k_j}{\sqrt{d}}\right) v_j,\quad T_c = \mathrm{top}_w(\mu_c^\top k)"
    )
    sketch: ClassVar = {"clusters": 3, "window": 4}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`clusters`; the `window` of tokens that each takes; the `decay` of centroids in training; their
        first `seed`."""

        clusters: int = 8
        window: int = 64
        decay: float = 0.999
        seed: int = 0

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("clusters", self.clusters, "clusters")
            check_whole("window", self.window, "tokens")
            if not 0 <= self.decay <= 1:
                raise InvalidValue.of("decay", self.decay, "a number from 0 to 1")

    def attention(self, config: MechanismConfig) -> Any:
        """Clusters with centroids drawn from the seed."""
        from attn_variants.mechanisms.clusters.layers import Routing

        heads, options = config.head_layout, self.Config.of(config)
        return Routing(
            heads=heads.query,
            size=heads.key_size,
            clusters=options.clusters,
            window=options.window,
            decay=options.decay,
            seed=options.seed,
        )

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Every query and key meets every centroid, and within a cluster all pairs meet."""
        (heads, size), options = self.inner_size(config), self.Config.of(config)
        window = min(options.window, shape.query)
        per_cluster = 2 * shape.query * size + 2 * window**2 * size
        flops = self.projected(config, shape) + 2 * shape.batch * heads * options.clusters * per_cluster
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))
