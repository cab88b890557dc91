"""Sigmoid attention."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.distributions import Sigmoid

from attn_variants.mechanisms.capabilities import UNNORMALISED
from attn_variants.mechanisms.masks import self_mask


class SigmoidAttention(DeclaredMechanism):
    """Every key gets its weight alone, less for more keys; rows do not sum to one."""

    name = "sigmoid"
    summary = "every key is weighted alone"
    paper = Paper(
        title="Theory, Analysis, and Best Practices for Sigmoid Self-Attention",
        authors="Ramapuram et al.",
        year=2024,
        arxiv="2409.04431",
    )
    equation = (
        r"O = \sigma\left(\frac{Q K^\top}{\sqrt{d_k}} - \ln n\right) V,\quad"
        r" n = \text{allowed keys}"
    )
    capabilities = UNNORMALISED

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, distribution=Sigmoid(), mask=self_mask(config), rotary=config.rotary)
