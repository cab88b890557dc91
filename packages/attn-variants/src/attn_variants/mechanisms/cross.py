"""Cross-attention."""

from __future__ import annotations

from attn_core import AttentionSpec, Capability, DeclaredMechanism, MechanismConfig, Paper
from attn_core.errors import Incompatible

from attn_variants.mechanisms.capabilities import GROUPED_SELF


class CrossAttention(DeclaredMechanism):
    """Scaled dot-product attention whose keys and values come from a source; they are computed once per source."""

    name = "cross"
    summary = "queries attend to a source, all of it at any time"
    paper = Paper(title="Attention Is All You Need", authors="Vaswani et al.", year=2017, arxiv="1706.03762")
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V,\quad"
        r" Q = X W^Q,\ K = S W^K,\ V = S W^V"
    )
    capabilities = GROUPED_SELF - {Capability.CAUSAL, Capability.ROTARY, Capability.BORROWS} | {Capability.CROSS}

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where rotary positions are asked for: queries and source share no positions."""
        if config.rotary is not None:
            raise Incompatible("mechanism 'cross' takes no rotary positions: queries and source share none")
        return AttentionSpec(heads=config.head_layout, cross=True)
