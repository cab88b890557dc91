"""The Sparse Transformer's strided attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, DeclaredMechanism, Mask, MechanismConfig, Paper
from attn_core.masks import PerHead
from attn_core.masks import Strided as StridedMask

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.sparse.common import DECODER, check_pattern, only_causal


class StridedAttention(DeclaredMechanism):
    """The last l positions, and every l-th one before: with l near √n each position is two steps from every earlier.

    All keys are remembered: which of them are seen changes from position to position. Made for inputs with a period,
    such as rows of pixels; for text the paper prefers 'fixed'.
    """

    name = "strided"
    summary = "the last positions and every l-th one before them"
    paper = Paper(
        title="Generating Long Sequences with Sparse Transformers",
        authors="Child et al.",
        year=2019,
        arxiv="1904.10509",
    )
    equation = (
        r"A^{(1)}_i = \{\max(0, i - l), \dots, i\},\quad A^{(2)}_i = \{j \le i : (i - j) \bmod l = 0\},\quad"
        r" o_i = \mathrm{softmax}\left(\frac{q_i K_{A_i}^\top}{\sqrt{d_k}}\right) V_{A_i}"
    )
    sketch: ClassVar = {"stride": 3}
    capabilities = DECODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`stride` l; `pattern` is "union", "heads" (even heads A¹, odd heads A²), "local" (A¹) or "column" (A²)."""

        stride: int = 128
        pattern: str = "union"

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("stride", self.stride, "tokens")
            check_pattern(self.pattern)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where it should look ahead, `InvalidValue` where heads do not divide."""
        only_causal(self.name, config)
        options = self.Config.of(config)
        both = StridedMask(options.stride)
        masks: dict[str, Mask] = {"union": both, "local": both.local, "column": both.column}
        mask = masks.get(options.pattern)
        if mask is None:
            mask = PerHead(tuple(both.column if head % 2 else both.local for head in range(config.heads)))
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)
