"""Masks by what kernels can do with them."""

from __future__ import annotations

SKIPPING = (
    "window",
    "composite",
    "prefix",
    "global",
    "strided",
    "fixed",
    "big_bird",
    "blocks",
    "neighbourhood",
    "segments",
    "chunk_ring",
    "chunked",
    "tree",
    "graph",
    "per_head",
)
"""Masks that name the keys of a query, so that the others are never met."""

TABLED = (*SKIPPING, "full", "causal", "predicate", "dense", "tensor")
"""Masks whose pairs become a tensor."""
