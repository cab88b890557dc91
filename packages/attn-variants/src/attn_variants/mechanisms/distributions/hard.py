"""Hard attention."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.distributions import Hard

from attn_variants.mechanisms.capabilities import CHOOSING
from attn_variants.mechanisms.masks import self_mask


class HardAttention(DeclaredMechanism):
    """All weight on the key of the largest score.

    The choice has no gradient: queries and keys do not learn from it, values do. `sampled` is the form that trains.
    """

    name = "hard"
    summary = "all weight on the key of the largest score"
    paper = Paper(
        title="Show, Attend and Tell: Neural Image Caption Generation with Visual Attention",
        authors="Xu et al.",
        year=2015,
        arxiv="1502.03044",
    )
    equation = (
        r"o_i = v_{j^*},\quad"
        r" j^* = \arg\max_j q_i^\top k_j"
    )
    capabilities = CHOOSING

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, distribution=Hard(), mask=self_mask(config), rotary=config.rotary)
