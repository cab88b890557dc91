"""Softmax off by one."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.distributions import SoftmaxOne

from attn_variants.mechanisms.capabilities import UNNORMALISED
from attn_variants.mechanisms.masks import self_mask


class SoftmaxOneAttention(DeclaredMechanism):
    """Softmax with one more in the denominator, so that a head may attend to nothing."""

    name = "softmax_one"
    summary = "softmax with one more in the denominator"
    paper = Paper(
        title="Attention Is Off By One",
        authors="Miller",
        year=2023,
    )
    equation = (
        r"\alpha_{ij} = \frac{\exp(e_{ij})}{1 + \sum_k \exp(e_{ik})},\quad"
        r" e = Q K^\top / \sqrt{d_k}"
    )
    capabilities = UNNORMALISED

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, distribution=SoftmaxOne(), mask=self_mask(config), rotary=config.rotary)
