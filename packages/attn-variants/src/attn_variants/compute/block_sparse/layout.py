"""Tiles of queries, the keys that each sees, and which pairs among them may meet."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import torch
from attn_core import Mask
from attn_core.kernels.attend import TILE
from attn_core.masks.layout import tiled
from attn_core.masks.ranges import Runs, merged, size
from torch import Tensor

ROUNDED = 16
"""Numbers of keys are rounded up to a multiple of this where they lie apart, so that tiles can go together."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Tiles of one size that are computed together.

    `queries` [tiles, query] and `keys` [tiles, key], int64, are numbers of rows; `allowed` [tiles or 1, query, key]
    which pairs may meet; None is all. Where `start` is given, tile t has the keys from `start + t * step` on.
    """

    queries: Tensor
    keys: Tensor
    allowed: Tensor | None
    start: int | None = None
    step: int = 0


Part = tuple[Bucket, ...]
"""Tiles in which each query is once, or not at all."""


@lru_cache(maxsize=256)
def parts(mask: Mask, queries: int, keys: int) -> tuple[Part, ...]:
    """The tiles of each mask that this one is split in, those of no tile left out; see `buckets`."""
    found = (buckets(part, queries, keys) for part in mask.over(keys).split)
    return tuple(part for part in found if part)


def buckets(mask: Mask, queries: int, keys: int) -> Part:
    """The tiles of `queries` queries aligned to the end of `keys` keys that see any key, on the CPU.

    The mask is the same for all heads.
    """
    bound = mask.over(keys)
    alike: dict[tuple[int, int, bool, bool], list[tuple[range, Runs]]] = defaultdict(list)
    for rows in tiled(bound, queries, TILE):
        each = [bound.runs(row + keys - queries, keys) for row in rows]
        runs = merged(sorted({piece for own in each for piece in own}))
        if runs:
            together, count = len(runs) == 1, size(runs)
            rounded = count if together else -(-count // ROUNDED) * ROUNDED
            alike[len(rows), rounded, together, all(own == runs for own in each)].append((rows, runs))
    return tuple(
        bucket(None if whole else bound, members, rounded, keys - queries)
        for (_, rounded, _, whole), members in sorted(alike.items())
    )


def bucket(mask: Mask | None, members: list[tuple[range, Runs]], rounded: int, offset: int) -> Bucket:
    """The bucket of tiles of as many queries, which see at most `rounded` keys; queries stand `offset` further.

    Where there is no mask, every query of a tile sees all that any of them does.
    """
    with torch.inference_mode(mode=False):
        queries = torch.tensor([list(rows) for rows, _ in members])
        listed = [[key for start, stop in runs for key in range(start, stop)] for _, runs in members]
        real = torch.tensor([size(runs) for _, runs in members])
        keys = torch.tensor([row + [0] * (rounded - len(row)) for row in listed])
        allowed = torch.arange(rounded) < real[:, None, None]
        if mask is not None:
            allowed = allowed & mask.allows(queries[:, :, None] + offset, keys[:, None, :])
        allowed = allowed.expand(-1, queries.shape[1], -1)
    if bool(allowed.all()):
        return Bucket(queries, keys, None, *evenly(keys, members))
    if bool((allowed == allowed[:1]).all()):
        allowed = allowed[:1].clone()
    return Bucket(queries, keys, allowed, *evenly(keys, members))


def evenly(keys: Tensor, members: list[tuple[range, Runs]]) -> tuple[int | None, int]:
    """Where the first tile's keys start and how far each next tile's are, if all are one run and evenly apart."""
    starts = keys[:, 0].tolist()
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    even = all(len(runs) == 1 for _, runs in members)
    even = even and step >= 0 and all(start == starts[0] + step * tile for tile, start in enumerate(starts))
    return (starts[0], step) if even else (None, 0)
