"""Multi-query attention."""

from __future__ import annotations

import dataclasses

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask


class MultiQueryAttention(DeclaredMechanism):
    """Scaled dot-product attention whose query heads all read one head of keys and values."""

    name = "mqa"
    summary = "all query heads share one head of keys and values"
    paper = Paper(
        title="Fast Transformer Decoding: One Write-Head is All You Need",
        authors="Shazeer",
        year=2019,
        arxiv="1911.02150",
    )
    equation = r"\mathrm{head}_h = \mathrm{softmax}\left(\frac{Q_h K^\top}{\sqrt{d_k}} + M\right) V"
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where more than one key/value head is asked for."""
        if config.key_value_heads not in {None, 1}:
            raise InvalidValue.of("key_value_heads", config.key_value_heads, "1; mechanism 'gqa' takes more")
        heads = dataclasses.replace(config.head_layout, key_value=1)
        return AttentionSpec(heads=heads, mask=self_mask(config), rotary=config.rotary)
