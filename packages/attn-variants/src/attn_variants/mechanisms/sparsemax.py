"""Sparsemax attention."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.distributions import Sparsemax

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask


class SparsemaxAttention(DeclaredMechanism):
    """Scaled dot-product attention that gives most keys a weight of exactly zero."""

    name = "sparsemax"
    summary = "weights are projected onto the simplex; most are zero"
    paper = Paper(
        title="From Softmax to Sparsemax: A Sparse Model of Attention and Multi-Label Classification",
        authors="Martins and Astudillo",
        year=2016,
        arxiv="1602.02068",
    )
    equation = (
        r"\alpha_i = \arg\min_{p \in \Delta} \left\lVert p - \frac{K q_i}{\sqrt{d_k}} \right\rVert^2,\quad"
        r" o_i = \alpha_i^\top V"
    )
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, mask=self_mask(config), distribution=Sparsemax(), rotary=config.rotary)
