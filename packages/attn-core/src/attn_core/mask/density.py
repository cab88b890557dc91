"""How much of all pairs is left when keys are skipped that no query of a tile sees."""

from __future__ import annotations

from functools import lru_cache

from attn_core.mask.mask import Mask
from attn_core.mask.runs import Runs, merged, size

SAMPLES = 8
"""Tiles that are looked at, evenly spread."""


@lru_cache(maxsize=256)
def density(mask: Mask, queries: int, keys: int, tile: int) -> float:
    """The share, from 0 to 1, estimated from a few tiles of `tile` queries and at most four heads.

    Queries are taken in the order of `tiled`. Both lengths are at least 1. Where runs are not known in closed form it
    is 1: finding them would take longer than the attention.
    """
    if not mask.closed:
        return 1.0
    bound = mask.over(keys)
    count = bound.heads or 1
    heads = [bound.of_head(head) for head in range(0, count, -(-count // 4))]
    shares = [seen_by_tiles(head, queries, keys, tile) for head in heads]
    return sum(shares) / len(shares)


def seen_by_tiles(mask: Mask, queries: int, keys: int, tile: int) -> float:
    """The share of the keys that a query meets, in the mean over a few tiles of each mask that this one is split in."""
    return sum(share_of_part(part, queries, keys, tile) for part in mask.split)


def share_of_part(mask: Mask, queries: int, keys: int, tile: int) -> float:
    """The share of the keys that a tile sees, in the mean over a few tiles."""
    tiles = tiled(mask, queries, tile)
    places = range(SAMPLES) if len(tiles) > SAMPLES else range(len(tiles))
    chosen = [tiles[(2 * place + 1) * len(tiles) // (2 * len(places))] for place in places]
    return sum(size(seen_by(mask, rows, queries, keys)) for rows in chosen) / (len(chosen) * keys)


def tiled(mask: Mask, queries: int, tile: int) -> list[range]:
    """The queries in tiles of at most `tile` that see nearly the same keys: neighbours, `mask.period` apart."""
    step = mask.period
    return [
        range(start, min(start + tile * step, queries), step)
        for residue in range(min(step, queries))
        for start in range(residue, queries, tile * step)
    ]


def seen_by(mask: Mask, rows: range, queries: int, keys: int) -> Runs:
    """The keys that some of the queries `rows` see; queries are numbered from 0 and aligned to the end of the keys."""
    offset = keys - queries
    return merged(sorted({piece for row in rows for piece in mask.runs(row + offset, keys)}))
