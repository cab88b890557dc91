"""The mechanisms of this folder."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.distributions.adaptive_entmax import AdaptiveEntmaxAttention
from attn_variants.mechanisms.distributions.entmax import EntmaxAttention
from attn_variants.mechanisms.distributions.hard import HardAttention
from attn_variants.mechanisms.distributions.sampled import SampledAttention
from attn_variants.mechanisms.distributions.sigmoid import SigmoidAttention
from attn_variants.mechanisms.distributions.sink import SinkAttention
from attn_variants.mechanisms.distributions.softmax_one import SoftmaxOneAttention
from attn_variants.mechanisms.distributions.stick_breaking import StickBreakingAttention


def distributions() -> list[Mechanism]:
    """One of each."""
    return [
        AdaptiveEntmaxAttention(),
        EntmaxAttention(),
        HardAttention(),
        SampledAttention(),
        SigmoidAttention(),
        SinkAttention(),
        SoftmaxOneAttention(),
        StickBreakingAttention(),
    ]
