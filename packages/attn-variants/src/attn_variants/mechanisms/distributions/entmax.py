"""α-entmax attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.distributions import Entmax

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_number

MOST = 32


class EntmaxAttention(DeclaredMechanism):
    """Sparse weights between softmax (towards α = 1) and sparsemax (α = 2)."""

    name = "entmax"
    summary = "sparse weights between softmax and sparsemax"
    paper = Paper(
        title="Sparse Sequence-to-Sequence Models",
        authors="Peters et al.",
        year=2019,
        arxiv="1905.05702",
    )
    equation = (
        r"\alpha\text{-entmax}(e)_j = \left[(\alpha - 1) e_j - \tau\right]_+^{1/(\alpha - 1)},\quad"
        r" e = Q K^\top / \sqrt{d_k} + M"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`alpha` above 1: 1.5 is solved exactly, others by bisection to the last bits."""

        alpha: float = 1.5

        def __post_init__(self) -> None:
            super().__post_init__()
            check_number("alpha", self.alpha, above=1, most=MOST)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        alpha = self.Config.of(config).alpha
        heads = config.head_layout
        return AttentionSpec(
            heads=heads, distribution=Entmax(alpha=alpha), mask=self_mask(config), rotary=config.rotary
        )
