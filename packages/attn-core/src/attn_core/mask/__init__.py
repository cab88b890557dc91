"""Masks: values from which follow who sees whom, how many pairs are allowed and how far back a cache must remember."""

from attn_core.mask.big_bird import BigBird
from attn_core.mask.block_sparse import BlockSparse
from attn_core.mask.blocks import BlockLayout, blocks
from attn_core.mask.causal import Causal
from attn_core.mask.chunk_ring import ChunkRing
from attn_core.mask.chunked import Chunked
from attn_core.mask.composite import Both, Either, Not
from attn_core.mask.dense import Dense
from attn_core.mask.fixed import Fixed, Summaries
from attn_core.mask.full import Full
from attn_core.mask.global_tokens import GlobalKeys, GlobalTokens
from attn_core.mask.graph import Graph
from attn_core.mask.mask import UNBOUNDED, Mask, Positions
from attn_core.mask.mask_mod import MaskMod, mask_mod
from attn_core.mask.neighbourhood import Neighbourhood
from attn_core.mask.neighbourhood_grid import NeighbourhoodGrid
from attn_core.mask.per_head import PerHead
from attn_core.mask.predicate import Predicate
from attn_core.mask.prefix import Prefix
from attn_core.mask.segments import Segments
from attn_core.mask.strided import Strided
from attn_core.mask.tree import Tree
from attn_core.mask.window import Window

__all__ = [
    "UNBOUNDED",
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
    "PerHead",
    "Positions",
    "Predicate",
    "Prefix",
    "Segments",
    "Strided",
    "Summaries",
    "Tree",
    "Window",
    "blocks",
    "mask_mod",
]
