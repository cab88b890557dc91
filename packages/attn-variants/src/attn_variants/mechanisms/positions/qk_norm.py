"""Attention with normed queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.norms import QkNorm

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_number


class QkNormAttention(DeclaredMechanism):
    """Queries and keys of every head have one length before they meet, up to a learned gain per element."""

    name = "qk_norm"
    summary = "queries and keys are normed in every head"
    paper = Paper(
        title="Query-Key Normalization for Transformers",
        authors="Henry et al.",
        year=2020,
        arxiv="2010.04245",
    )
    equation = (
        r"O = \mathrm{softmax}\left(\frac{\hat Q \hat K^\top}{\sqrt{d_k}} + M\right) V,\quad"
        r" \hat q = g_q \odot q / \mathrm{rms}(q),\quad"
        r" \hat k = g_k \odot k / \mathrm{rms}(k)"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`eps` is added to the mean square."""

        eps: float = 1e-6

        def __post_init__(self) -> None:
            super().__post_init__()
            check_number("eps", self.eps, above=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        eps = self.Config.of(config).eps
        heads = config.head_layout
        return AttentionSpec(heads=heads, norm=QkNorm(eps=eps), mask=self_mask(config), rotary=config.rotary)
