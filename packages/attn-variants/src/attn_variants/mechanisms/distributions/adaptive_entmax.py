"""Adaptively sparse attention."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.distributions import AdaptiveEntmax

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask


class AdaptiveEntmaxAttention(DeclaredMechanism):
    """α-entmax whose α every head learns: some heads become sparse, others stay near softmax."""

    name = "adaptive_entmax"
    summary = "every head learns how sparse its weights are"
    paper = Paper(
        title="Adaptively Sparse Transformers",
        authors="Correia et al.",
        year=2019,
        arxiv="1909.00015",
    )
    equation = (
        r"\alpha_h = 1 + \sigma(a_h),\quad"
        r" O_h = \alpha_h\text{-entmax}(Q_h K_h^\top / \sqrt{d_k} + M) V_h"
    )
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, distribution=AdaptiveEntmax(), mask=self_mask(config), rotary=config.rotary)
