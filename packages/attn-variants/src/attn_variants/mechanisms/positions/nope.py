"""Attention without positions."""

from __future__ import annotations

from attn_core import AttentionSpec, Capability, DeclaredMechanism, MechanismConfig, Paper
from attn_core.errors import Incompatible

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask


class NoPositions(DeclaredMechanism):
    """Scaled dot-product attention to which nothing tells the order but, in two layers or more, the causal mask."""

    name = "nope"
    summary = "no positions; the causal mask alone tells the order"
    paper = Paper(
        title="The Impact of Positional Encoding on Length Generalization in Transformers",
        authors="Kazemnejad et al.",
        year=2023,
        arxiv="2305.19466",
    )
    equation = r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V"
    capabilities = GROUPED_SELF - {Capability.ROTARY}

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where rotary positions are asked for."""
        if config.rotary is not None:
            raise Incompatible("mechanism 'nope' takes no rotary positions: it is attention without any")
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config))
