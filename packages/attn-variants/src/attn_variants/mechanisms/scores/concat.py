"""Concat attention."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.scores import Concat

from attn_variants.mechanisms.additive import AdditiveConfig
from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask


class ConcatAttention(DeclaredMechanism):
    """A small network scores every key and query laid end to end."""

    name = "concat"
    summary = "a small network over key and query laid end to end"
    paper = Paper(
        title="Effective Approaches to Attention-based Neural Machine Translation",
        authors="Luong et al.",
        year=2015,
        arxiv="1508.04025",
    )
    equation = (
        r"e_{ij} = v^\top \tanh(W [k_j; q_i] + b),\quad"
        r" O = \mathrm{softmax}(e + M) V"
    )
    capabilities = GROUPED_SELF
    Config = AdditiveConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        score = Concat(hidden=AdditiveConfig.of(config).hidden)
        heads = config.head_layout
        return AttentionSpec(heads=heads, score=score, mask=self_mask(config), rotary=config.rotary)
