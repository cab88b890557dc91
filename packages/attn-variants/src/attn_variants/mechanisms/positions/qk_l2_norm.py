"""Attention with queries and keys of length one."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.norms import QkL2Norm
from attn_core.scores import Dot

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_number, check_whole


class QkL2NormAttention(DeclaredMechanism):
    """Scores are cosines of queries and keys times one learned number, which takes the place of 1/√d_k."""

    name = "qk_l2_norm"
    summary = "queries and keys have length one, times one learned number"
    paper = Paper(
        title="Query-Key Normalization for Transformers",
        authors="Henry et al.",
        year=2020,
        arxiv="2010.04245",
    )
    equation = (
        r"O = \mathrm{softmax}\left(g\, \hat Q \hat K^\top + M\right) V,\quad"
        r" \hat q = q / \lVert q \rVert,\quad \hat k = k / \lVert k \rVert"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`length` n of the sequences that are trained on: g is log₂(n² - n) at first. `eps` is added to the square of
        a length."""

        length: int = 1024
        eps: float = 1e-12

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("length", self.length, "tokens", least=2)
            check_number("eps", self.eps, above=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        own = self.Config.of(config)
        norm = QkL2Norm(eps=own.eps, length=own.length)
        return AttentionSpec(heads=own.head_layout, score=Dot(), norm=norm, mask=self_mask(own), rotary=own.rotary)
