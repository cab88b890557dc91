"""The Sparse Transformer's fixed attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, DeclaredMechanism, Mask, MechanismConfig, Paper
from attn_core.masks import Fixed as FixedMask
from attn_core.masks import PerHead, Summaries

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.sparse.common import DECODER, check_pattern, only_causal


class FixedAttention(DeclaredMechanism):
    """A query's own block, and the last c cells of every earlier one, which sum it up.

    A decoder would need l + c n/l keys; here all are remembered, because rows per token are kept or dropped by their
    distance only.
    """

    name = "fixed"
    summary = "a query's own block and the summary cells of all earlier ones"
    paper = Paper(
        title="Generating Long Sequences with Sparse Transformers",
        authors="Child et al.",
        year=2019,
        arxiv="1904.10509",
    )
    equation = (
        r"A^{(1)}_i = \{j \le i : \lfloor j/l \rfloor = \lfloor i/l \rfloor\},\quad"
        r" A^{(2)}_i = \{j \le i : j \bmod l \ge l - c\},\quad"
        r" o_i = \mathrm{softmax}\left(\frac{q_i K_{A_i}^\top}{\sqrt{d_k}}\right) V_{A_i}"
    )
    sketch: ClassVar = {"block": 4, "summaries": 1}
    capabilities = DECODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`block` l and `summaries` c; `pattern` is "union", "heads", "local" (A¹) or "column" (A²).

        With "heads", even heads have A¹, and the odd ones A² in turn with the last c cells, the c before them, and so
        on.
        """

        block: int = 128
        summaries: int = 8
        pattern: str = "union"

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("block", self.block, "tokens")
            check_whole("summaries", self.summaries, "tokens")
            FixedMask(block=self.block, summaries=self.summaries)
            check_pattern(self.pattern)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where it should look ahead, `InvalidValue` where heads do not divide."""
        only_causal(self.name, config)
        options = self.Config.of(config)
        both = FixedMask(block=options.block, summaries=options.summaries)
        masks: dict[str, Mask] = {"union": both, "local": both.local, "column": both.column}
        mask = masks.get(options.pattern)
        if mask is None:
            mask = PerHead(tuple(self.of_head(both, head) for head in range(config.heads)))
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)

    @staticmethod
    def of_head(both: FixedMask, head: int) -> Mask:
        """The pattern of one head where each has one."""
        if head % 2 == 0:
            return both.local
        shift = head // 2 % (both.block // both.summaries)
        return Summaries(block=both.block, cells=both.summaries, shift=shift)
