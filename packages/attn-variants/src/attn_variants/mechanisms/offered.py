"""All mechanisms of this package."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.additive import AdditiveAttention
from attn_variants.mechanisms.alibi import AttentionWithLinearBiases
from attn_variants.mechanisms.cross import CrossAttention
from attn_variants.mechanisms.distributions.family import distributions
from attn_variants.mechanisms.gemma import GemmaAttention
from attn_variants.mechanisms.general import GeneralAttention
from attn_variants.mechanisms.gqa import GroupedQueryAttention
from attn_variants.mechanisms.linear import LinearAttention
from attn_variants.mechanisms.memory.family import memories
from attn_variants.mechanisms.mha import MultiHeadAttention
from attn_variants.mechanisms.mqa import MultiQueryAttention
from attn_variants.mechanisms.positions.family import positions
from attn_variants.mechanisms.recurrences.family import recurrences
from attn_variants.mechanisms.reduced import reduced
from attn_variants.mechanisms.rope import RotaryAttention
from attn_variants.mechanisms.scores.family import scores
from attn_variants.mechanisms.sliding_window import SlidingWindow
from attn_variants.mechanisms.sparse.family import sparse
from attn_variants.mechanisms.sparsemax import SparsemaxAttention


def offered() -> list[Mechanism]:
    """One of each."""
    return [
        MultiHeadAttention(),
        GroupedQueryAttention(),
        MultiQueryAttention(),
        SlidingWindow(),
        CrossAttention(),
        AttentionWithLinearBiases(),
        RotaryAttention(),
        AdditiveAttention(),
        GemmaAttention(),
        GeneralAttention(),
        SparsemaxAttention(),
        LinearAttention(),
        *scores(),
        *distributions(),
        *positions(),
        *sparse(),
        *reduced(),
        *recurrences(),
        *memories(),
    ]
