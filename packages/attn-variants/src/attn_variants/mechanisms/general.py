"""General (bilinear) attention."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.scores import General

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask


class GeneralAttention(DeclaredMechanism):
    """A learned matrix between query and key scores every pair; the scores are not scaled."""

    name = "general"
    summary = "a learned matrix between query and key"
    paper = Paper(
        title="Effective Approaches to Attention-based Neural Machine Translation",
        authors="Luong et al.",
        year=2015,
        arxiv="1508.04025",
    )
    equation = r"O = \mathrm{softmax}(Q W K^\top + M) V"
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, score=General(), mask=self_mask(config), rotary=config.rotary)
