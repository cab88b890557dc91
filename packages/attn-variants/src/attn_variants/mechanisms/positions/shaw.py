"""Relative position representations."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.modifiers import RelativeKeys, RelativeValues

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_flag, check_whole


class ShawAttention(DeclaredMechanism):
    """A learned vector per distance is added to the keys, and another to the values."""

    name = "shaw"
    summary = "learned vectors per distance on keys and values"
    paper = Paper(
        title="Self-Attention with Relative Position Representations",
        authors="Shaw et al.",
        year=2018,
        arxiv="1803.02155",
    )
    equation = (
        r"e_{ij} = \frac{q_i^\top (k_j + a^K_{c(j - i)})}{\sqrt{d_k}},\quad"
        r" o_i = \sum_j \alpha_{ij} (v_j + a^V_{c(j - i)}),\quad"
        r" c(x) = \max(-k, \min(k, x))"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`clip` k: distances beyond it count as it; `share` says that heads share the vectors."""

        clip: int = 16
        share: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("clip", self.clip, "positions", least=0)
            check_flag("share", self.share)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        options = self.Config.of(config)
        tables = (
            RelativeKeys(clip=options.clip, share=options.share),
            RelativeValues(clip=options.clip, share=options.share),
        )
        heads = config.head_layout
        return AttentionSpec(heads=heads, modifiers=tables, mask=self_mask(config), rotary=config.rotary)
