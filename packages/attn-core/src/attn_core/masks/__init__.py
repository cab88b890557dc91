"""Masks as values: which keys a query may see, how many pairs are allowed, and how far back a cache must reach."""

from attn_core.masks.bands import (
    Band,
    Causal,
    Chunked,
    ChunkRing,
    Full,
    PackedBand,
    Prefix,
    Segments,
    Window,
    band_of,
    varlen_band_of,
)
from attn_core.masks.base import UNBOUNDED, Both, Either, Mask, Not, PerHead, Positions, Predicate, pinned_positions
from attn_core.masks.big_bird import BigBird
from attn_core.masks.graphs import BlockSparse, Dense, Graph, Tree
from attn_core.masks.layout import BlockLayout, MaskMod, blocks, mask_mod
from attn_core.masks.reach import Reach
from attn_core.masks.sparse import Fixed, GlobalKeys, GlobalTokens, Neighbourhood, NeighbourhoodGrid, Strided, Summaries

__all__ = [
    "UNBOUNDED",
    "Band",
    "BigBird",
    "BlockLayout",
    "BlockSparse",
    "Both",
    "Causal",
    "ChunkRing",
    "Chunked",
    "Dense",
    "Either",
    "Fixed",
    "Full",
    "GlobalKeys",
    "GlobalTokens",
    "Graph",
    "Mask",
    "MaskMod",
    "Neighbourhood",
    "NeighbourhoodGrid",
    "Not",
    "PackedBand",
    "PerHead",
    "Positions",
    "Predicate",
    "Prefix",
    "Reach",
    "Segments",
    "Strided",
    "Summaries",
    "Tree",
    "Window",
    "band_of",
    "blocks",
    "mask_mod",
    "pinned_positions",
    "varlen_band_of",
]
