"""Cosine attention."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.scores import Cosine

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask


class CosineAttention(DeclaredMechanism):
    """The angle between query and key scores the pairs, with a learned sharpness in every head."""

    name = "cosine"
    summary = "the angle between query and key, with a learned sharpness"
    paper = Paper(
        title="Neural Turing Machines",
        authors="Graves et al.",
        year=2014,
        arxiv="1410.5401",
    )
    equation = (
        r"e_{ij} = \beta_h \frac{q_i^\top k_j}{\lVert q_i \rVert \lVert k_j \rVert + \epsilon},\quad"
        r" \beta_h = \mathrm{softplus}(b_h),\quad"
        r" O = \mathrm{softmax}(e + M) V"
    )
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, score=Cosine(), mask=self_mask(config), rotary=config.rotary)
