"""Tiles of queries, the keys that each sees, and which of their pairs are allowed."""

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
"""The number of keys of a tile is rounded up to a multiple of this if they are not contiguous, to share buckets."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Tiles of one size that are computed together.

    `queries` [tiles, query] and `keys` [tiles, key], int64, are row indices; `allowed` is bool [tiles or 1, query, key]
    or None if all are allowed. If `start` is given, the keys of tile t are contiguous from `start + t * step` on.
    """

    queries: Tensor
    keys: Tensor
    allowed: Tensor | None
    start: int | None = None
    step: int = 0


Part = tuple[Bucket, ...]
"""Buckets of tiles in which each query occurs at most once."""


@lru_cache(maxsize=256)
def parts(mask: Mask, queries: int, keys: int) -> tuple[Part, ...]:
    """The tiles of each of the masks that this one is split into, without empty ones; see `buckets`."""
    found = (buckets(part, queries, keys) for part in mask.over(keys).split)
    return tuple(part for part in found if part)


def buckets(mask: Mask, queries: int, keys: int) -> Part:
    """The tiles that see any key, of `queries` queries aligned to the last of `keys` keys, on the CPU.

    The mask must be the same for all heads.
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
    """Build the bucket of tiles with the same number of queries and at most `rounded` keys.

    The position of a query is its row plus `offset`. Without a mask, all queries of a tile see all of its keys.
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
    """The first key of the first tile, and the step between tiles, if the keys are evenly spaced contiguous runs.

    Otherwise None and 0.
    """
    starts = keys[:, 0].tolist()
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    even = all(len(runs) == 1 for _, runs in members)
    even = even and step >= 0 and all(start == starts[0] + step * tile for tile, start in enumerate(starts))
    return (starts[0], step) if even else (None, 0)
