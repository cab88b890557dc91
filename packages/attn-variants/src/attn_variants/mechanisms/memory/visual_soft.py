"""Soft attention to annotations, gated by how much the query needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core import Cost, MechanismConfig, Paper, Shape

from attn_variants.mechanisms.memory.alignment import Alignment

if TYPE_CHECKING:
    from attn_variants.memory.visual import Gated


class SoftVisual(Alignment):
    """Additive attention to annotations of an image; a gate β of the query says how much of what is seen is let in."""

    name = "visual_soft"
    summary = "the mean annotation by soft weights, gated"
    paper = Paper(
        title="Show, Attend and Tell: Neural Image Caption Generation with Visual Attention",
        authors="Xu et al.",
        year=2015,
        arxiv="1502.03044",
    )
    equation = (
        r"\alpha_t = \mathrm{softmax}_i\left(v^\top \tanh(W_a a_i + W_d h_{t-1} + b)\right),\quad"
        r" \hat z_t = \sigma(W_\beta h_{t-1}) \sum_i \alpha_{ti} a_i"
    )

    drops_weights = True

    def inner(self, config: MechanismConfig) -> Gated:
        """The gate of every head with random weights."""
        from attn_variants.memory.visual import Gated

        return Gated(config.width, config.heads)

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """That of the attention, and of the gates, which always have a bias."""
        flops = 2 * shape.batch * shape.query * config.width * config.heads
        gates = Cost(flops=flops, allowed_flops=flops, parameters=(config.width + 1) * config.heads)
        return super().cost(config, shape) + gates
