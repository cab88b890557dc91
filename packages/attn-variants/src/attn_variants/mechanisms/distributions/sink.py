"""Attention with learned sinks."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.distributions import SoftmaxWithSink

from attn_variants.mechanisms.capabilities import UNNORMALISED
from attn_variants.mechanisms.masks import self_mask


class SinkAttention(DeclaredMechanism):
    """Softmax with a learned logit per head in the denominator, which takes the weight that no key deserves."""

    name = "sink"
    summary = "a learned logit per head takes the weight that no key deserves"
    paper = Paper(
        title="gpt-oss-120b and gpt-oss-20b Model Card",
        authors="OpenAI",
        year=2025,
        arxiv="2508.10925",
    )
    equation = (
        r"\alpha_{ij} = \frac{\exp(e_{ij})}{\exp(s_h) + \sum_k \exp(e_{ik})},\quad"
        r" e = Q_h K_h^\top / \sqrt{d_k}"
    )
    capabilities = UNNORMALISED

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, distribution=SoftmaxWithSink(), mask=self_mask(config), rotary=config.rotary)
