"""Block-local attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, Causal, DeclaredMechanism, Mask, MechanismConfig, Paper
from attn_core.masks import Chunked

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.sparse.common import check_least


class BlockLocalAttention(DeclaredMechanism):
    """A query sees its own block and the blocks next to it; where causal, its own up to itself and those before."""

    name = "block_local"
    summary = "a query's own block and the ones next to it"
    paper = Paper(title="Image Transformer", authors="Parmar et al.", year=2018, arxiv="1802.05751")
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" M_{ij} = 0 \text{ if } |\lfloor i/b \rfloor - \lfloor j/b \rfloor| \le r \text{ else } -\infty"
    )
    sketch: ClassVar = {"block": 3}
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`block` b of tokens; `reach` r, how many blocks before (and, unless causal, after) its own a query sees."""

        block: int = 128
        reach: int = 1

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("block", self.block, "tokens")
            check_least("reach", self.reach, 0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        options = self.Config.of(config)
        ahead = 0 if config.causal else options.reach
        near: Mask = Chunked(size=options.block, back=options.reach, ahead=ahead)
        mask = near & Causal() if config.causal else near
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)
