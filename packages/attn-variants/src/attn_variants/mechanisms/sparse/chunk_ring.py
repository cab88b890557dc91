"""Chunks that stand in a ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.masks import ChunkRing

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.sparse.common import ENCODER, check_least, never_causal


class ChunkRingAttention(DeclaredMechanism):
    """A query sees its own chunk and those before it; before the first chunk stands the last.

    The layers between those that hash in the Reformer's code.
    """

    name = "chunk_ring"
    summary = "a query's own chunk and the ones before it, in a ring"
    paper = Paper(title="Reformer: The Efficient Transformer", authors="Kitaev et al.", year=2020, arxiv="2001.04451")
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" M_{ij} = 0 \text{ if } (\lfloor i/c \rfloor - \lfloor j/c \rfloor) \bmod \lceil n/c \rceil \le r"
        r" \text{ else } -\infty"
    )
    sketch: ClassVar = {"chunk": 3}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`chunk` c of tokens; `reach` r, how many chunks before its own a query sees."""

        chunk: int = 64
        reach: int = 1

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("chunk", self.chunk, "tokens")
            check_least("reach", self.reach, 0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where it should be causal, `InvalidValue` where heads do not divide."""
        never_causal(self.name, config)
        options = self.Config.of(config)
        mask = ChunkRing(size=options.chunk, back=options.reach)
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)
