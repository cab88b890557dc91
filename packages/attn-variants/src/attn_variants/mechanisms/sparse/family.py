"""The mechanisms of this folder."""

from __future__ import annotations

from attn_core import Mechanism

from attn_variants.mechanisms.sparse.attention_sinks import AttentionSinks
from attn_variants.mechanisms.sparse.bigbird import BigBirdAttention
from attn_variants.mechanisms.sparse.block_local import BlockLocalAttention
from attn_variants.mechanisms.sparse.chunk_ring import ChunkRingAttention
from attn_variants.mechanisms.sparse.chunked import ChunkedAttention
from attn_variants.mechanisms.sparse.dilated_window import DilatedWindow
from attn_variants.mechanisms.sparse.fixed import FixedAttention
from attn_variants.mechanisms.sparse.h2o import HeavyHitters
from attn_variants.mechanisms.sparse.longformer import LongformerAttention
from attn_variants.mechanisms.sparse.neighborhood import NeighborhoodAttention
from attn_variants.mechanisms.sparse.strided import StridedAttention


def sparse() -> list[Mechanism]:
    """One of each."""
    return [
        DilatedWindow(),
        LongformerAttention(),
        AttentionSinks(),
        HeavyHitters(),
        StridedAttention(),
        FixedAttention(),
        BigBirdAttention(),
        NeighborhoodAttention(),
        ChunkedAttention(),
        BlockLocalAttention(),
        ChunkRingAttention(),
    ]
