"""Attention with linear biases."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.modifiers import Alibi

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask


class AttentionWithLinearBiases(DeclaredMechanism):
    """Scaled dot-product attention whose scores fall with the distance, at a rate of its own in every head.

    Where it is not causal, the bias is the same on both sides of the query.
    """

    name = "alibi"
    summary = "scores fall linearly with the distance"
    paper = Paper(
        title="Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        authors="Press et al.",
        year=2022,
        arxiv="2108.12409",
    )
    equation = (
        r"O_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}} - m_h |i - j| + M\right) V_h,\quad"
        r" m_h = 2^{-8h/H}"
    )
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, modifiers=(Alibi(),), mask=self_mask(config), rotary=config.rotary)
