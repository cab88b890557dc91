"""Disentangled attention of content and relative positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from attn_core import (
    AttentionSpec,
    Capability,
    Computation,
    Cost,
    DeclaredMechanism,
    MechanismConfig,
    Paper,
    Shape,
    Step,
)
from attn_core.scores import ScaledDot

from attn_variants.mechanisms.common import ENCODER, self_attention
from attn_variants.mechanisms.disentangled_options import DisentangledConfig


class DisentangledAttention(DeclaredMechanism):
    """Scores are the sum of the products of content with content, of queries with relative positions, and of keys with
    relative positions, whose vectors the projections of the layer turn into keys and queries.

    A position is the vector of the query's minus the key's place; far distances share vectors, and all layers of a
    model share them all.
    """

    name = "disentangled"
    summary = "queries and keys are each multiplied by vectors of relative positions, too"
    used_by = ("DeBERTa",)
    paper = Paper(
        title="DeBERTa: Decoding-enhanced BERT with Disentangled Attention",
        authors="He et al.",
        year=2020,
        arxiv="2006.03654",
    )
    equation = (
        r"e_{ij} = \frac{q_i^\top k_j + q_i^\top W_k p_{\delta(i - j)} + k_j^\top W_q p_{\delta(i - j)}}{\sqrt{3 d_k}},"
        r"\quad o_i = \sum_j \mathrm{softmax}_j(e_{ij})\, v_j"
    )
    sketch: ClassVar = {"buckets": 4, "max_distance": 8}
    capabilities = ENCODER - {Capability.ROTARY}

    Config = DisentangledConfig
    drops_weights = True

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention by content, with the scale of all products."""
        scale = (config.head_layout.key_size * self.Config.of(config).products) ** -0.5
        return self_attention(config, score=ScaledDot(scale=scale))

    def build(self, config: MechanismConfig) -> Any:
        """A new `DisentangledLayer`."""
        from attn_variants.mechanisms.disentangled_layer import DisentangledLayer

        return DisentangledLayer(self.spec(config), self.Config.of(config))

    def share_weights(self, layers: Sequence[tuple[MechanismConfig, Any]]) -> None:
        """Share the vectors of the first layer with all others that have as many, as in the paper."""
        owner = layers[0][1]
        for _, layer in layers:
            if layer.vectors.table.weight.shape == owner.vectors.table.weight.shape:
                layer.vectors = owner.vectors

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """The layer's own computation, as no kernel multiplies positions."""
        return (Computation(),)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost by content, and that of the projections of positions and of their products; vectors are those of
        the model's first layer."""
        own, heads = self.Config.of(config), config.head_layout
        vectors, query = 2 * own.span, heads.query * heads.key_size
        widths = query * own.key_positions + heads.key_value * heads.key_size * own.query_positions
        products = 2 * shape.batch * shape.query * query * vectors * (own.products - 1)
        flops = 2 * vectors * config.hidden_size * widths + products
        table = 0 if config.layer else config.hidden_size * (vectors + (0 if own.norm_eps is None else 2))
        weights = (config.hidden_size + config.bias) * widths if own.separate else 0
        return super().cost(config, shape) + Cost(flops=flops, allowed_flops=flops, parameters=table + weights)
