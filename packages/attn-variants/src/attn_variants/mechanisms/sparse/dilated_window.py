"""Dilated sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, DeclaredMechanism, Mask, MechanismConfig, Paper, Window
from attn_core.errors import InvalidValue
from attn_core.masks import PerHead

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.sparse.common import whole_numbers


class DilatedWindow(DeclaredMechanism):
    """A sliding window that sees every d-th position only, with a dilation d of its own for each head.

    What is remembered reaches back as far as the most dilated head.
    """

    name = "dilated_window"
    summary = "windows with gaps, which each head may have of its own"
    paper = Paper(
        title="Longformer: The Long-Document Transformer", authors="Beltagy et al.", year=2020, arxiv="2004.05150"
    )
    equation = (
        r"O_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}} + M_h\right) V_h,\quad"
        r" M_{h,ij} = 0 \text{ if } d_h \mid i - j \text{ and } |i - j| \le \tfrac{w}{2} d_h \text{ else } -\infty"
    )
    sketch: ClassVar = {"window": 3}
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`window` counts the visible tokens as that of 'sliding_window' does, in steps of the dilation.

        `dilations` are the steps of the heads in turn, 1 for none: head h has `dilations[h mod their number]`.
        """

        window: int = 256
        dilations: tuple[int, ...] = (1, 2)

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("window", self.window, "tokens")
            object.__setattr__(self, "dilations", whole_numbers("dilations", self.dilations, 1))
            if not self.dilations:
                raise InvalidValue.of("dilations", self.dilations, "at least one")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        options = self.Config.of(config)
        windows = [self.window(options.window, step, causal=config.causal) for step in options.dilations]
        masks = tuple(windows[head % len(windows)] for head in range(config.heads))
        mask = masks[0] if len(set(masks)) == 1 else PerHead(masks)
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)

    @staticmethod
    def window(size: int, dilation: int, *, causal: bool) -> Mask:
        """The window of one head."""
        left, right = (size - 1, 0) if causal else (size // 2, size // 2)
        return Window(left=left, right=right, dilation=dilation)
