"""Attention with capped scores."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.modifiers import SoftCap

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_number


class SoftCapAttention(DeclaredMechanism):
    """No score exceeds the cap, which keeps them out of the softmax's flat ends."""

    name = "soft_cap"
    summary = "scores are kept below a cap by a tanh"
    paper = Paper(
        title="Gemma 2: Improving Open Language Models at a Practical Size",
        authors="Gemma Team",
        year=2024,
        arxiv="2408.00118",
    )
    equation = r"O = \mathrm{softmax}\left(c \tanh\left(\frac{Q K^\top}{c \sqrt{d_k}}\right) + M\right) V"
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`cap` c of the scores."""

        cap: float = 50.0

        def __post_init__(self) -> None:
            super().__post_init__()
            check_number("cap", self.cap, above=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        cap = self.Config.of(config).cap
        heads = config.head_layout
        return AttentionSpec(heads=heads, modifiers=(SoftCap(cap=cap),), mask=self_mask(config), rotary=config.rotary)
