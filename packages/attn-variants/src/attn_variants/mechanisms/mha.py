"""Multi-head attention."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.capabilities import SELF
from attn_variants.mechanisms.masks import self_mask


class MultiHeadAttention(DeclaredMechanism):
    """Scaled dot-product attention in several heads, each with its own keys and values."""

    name = "mha"
    summary = "scaled dot-product attention in several heads"
    paper = Paper(title="Attention Is All You Need", authors="Vaswani et al.", year=2017, arxiv="1706.03762")
    equation = (
        r"\mathrm{head}_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}} + M\right) V_h,\quad"
        r" O = [\mathrm{head}_1; \dots; \mathrm{head}_H] W^O"
    )
    capabilities = SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where fewer key/value heads than heads are asked for."""
        if config.key_value_heads not in {None, config.heads}:
            allowed = f"{config.heads}, as many as heads; mechanism 'gqa' takes fewer, 'mqa' one"
            raise InvalidValue.of("key_value_heads", config.key_value_heads, allowed)
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config), rotary=config.rotary)
