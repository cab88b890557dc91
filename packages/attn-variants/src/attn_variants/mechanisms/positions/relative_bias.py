"""Relative bias."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.modifiers import RelativeBias

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_whole


class RelativeBiasAttention(DeclaredMechanism):
    """A learned bias per head and distance."""

    name = "relative_bias"
    summary = "a learned bias per head and distance"
    paper = Paper(
        title="Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
        authors="Liu et al.",
        year=2021,
        arxiv="2103.14030",
    )
    equation = (
        r"O_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}} + b_{h,\,\mathrm{clip}(j - i)} + M\right) V_h"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`clip`: distances beyond it count as it."""

        clip: int = 16

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("clip", self.clip, "positions")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        clip = self.Config.of(config).clip
        heads = config.head_layout
        return AttentionSpec(
            heads=heads, modifiers=(RelativeBias(clip=clip),), mask=self_mask(config), rotary=config.rotary
        )
