"""Sliding-window attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper, Window

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.options import check_whole


class SlidingWindow(DeclaredMechanism):
    """Scaled dot-product attention to the nearest positions only; the cache is a ring of `window` rows."""

    name = "sliding_window"
    summary = "attention to the nearest positions only"
    paper = Paper(
        title="Longformer: The Long-Document Transformer", authors="Beltagy et al.", year=2020, arxiv="2004.05150"
    )
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" M_{ij} = 0 \text{ if } 0 \le i - j < w \text{ else } -\infty"
    )
    sketch: ClassVar = {"window": 4}
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`window` counts the visible tokens: causal, the query's own and `window - 1` before it, as in Mistral;
        else half of `window` on either side of the query's own, as in Longformer."""

        window: int = 256

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("window", self.window, "tokens")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        window = self.Config.of(config).window
        mask = Window(left=window - 1) if config.causal else Window(left=window // 2, right=window // 2)
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)
