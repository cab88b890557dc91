"""Chunked attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, Causal, DeclaredMechanism, Mask, MechanismConfig, Paper
from attn_core.masks import Chunked

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.options import check_whole


class ChunkedAttention(DeclaredMechanism):
    """A query sees its own chunk of the sequence only, up to itself where causal; the cache is a ring of one chunk."""

    name = "chunked"
    summary = "attention inside chunks of the sequence"
    paper = Paper(
        title="The Llama 4 herd: The beginning of a new era of natively multimodal AI innovation",
        authors="Meta AI",
        year=2025,
    )
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" M_{ij} = 0 \text{ if } \lfloor i/c \rfloor = \lfloor j/c \rfloor \text{ and } j \le i \text{ else } -\infty"
    )
    sketch: ClassVar = {"chunk": 4}
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`chunk` c of tokens; Llama 4's is 8192."""

        chunk: int = 8192

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("chunk", self.chunk, "tokens")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        chunk = self.Config.of(config).chunk
        own: Mask = Chunked(size=chunk)
        mask = own & Causal() if config.causal else own
        return AttentionSpec(heads=config.head_layout, mask=mask, rotary=config.rotary)
