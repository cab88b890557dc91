"""The mechanisms of this folder."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.scores.concat import ConcatAttention
from attn_variants.mechanisms.scores.cosine import CosineAttention
from attn_variants.mechanisms.scores.dot import DotAttention
from attn_variants.mechanisms.scores.local_m import MonotonicLocalAttention
from attn_variants.mechanisms.scores.local_p import PredictiveLocalAttention
from attn_variants.mechanisms.scores.location import LocationAttention
from attn_variants.mechanisms.scores.luong import GlobalLuongAttention


def scores() -> list[Mechanism]:
    """One of each."""
    return [
        ConcatAttention(),
        CosineAttention(),
        DotAttention(),
        MonotonicLocalAttention(),
        PredictiveLocalAttention(),
        LocationAttention(),
        GlobalLuongAttention(),
    ]
