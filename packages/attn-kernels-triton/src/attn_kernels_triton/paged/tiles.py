"""Tile configurations of the paged kernels."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from attn_kernels_triton.attention.tiles import NEWER
from attn_kernels_triton.launch import power_of_two

FEW = 16
"""Rows of a tile, heads of a group times tokens, where a request has no more."""


class Heads(NamedTuple):
    """Heads that share keys, key/value heads, rows of a tile where a request has more than a few, and how many `times`
    as long as usual stretches are; or how many stretches are `wanted` of all requests together, 0 where each is cut for
    itself."""

    group: int
    owners: int
    many: int
    times: int = 1
    wanted: int = 0


class PagedChoice(NamedTuple):
    """Keys of a tile, warps, stages of the pipeline that loads ahead, how many `times` as long stretches are that are
    cut for each request alone, and how many `programs` a processor is given where a whole bucket is cut."""

    keys: int
    warps: int
    stages: int
    times: int = 1
    programs: int = 4


PAGED_CHOICES: dict[tuple[int, bool, int], PagedChoice] = {
    (16, True, 64): PagedChoice(64, 4, 3),
    (16, True, 128): PagedChoice(64, 4, 3, times=2),
    (16, True, 256): PagedChoice(32, 4, 3),
    (16, True, 512): PagedChoice(32, 4, 2 if NEWER else 3, times=8, programs=2),
    (64, True, 64): PagedChoice(64, 4, 3),
    (64, True, 128): PagedChoice(64, 4, 2),
    (64, True, 256): PagedChoice(32, 8, 2),
    (32, True, 512): PagedChoice(32 if NEWER else 64, 8, 2, times=8, programs=1),
    (64, True, 512): PagedChoice(64, 8, 3, times=8, programs=1),
    (16, False, 64): PagedChoice(32, 4, 1),
    (16, False, 128): PagedChoice(32, 4, 1),
    (16, False, 256): PagedChoice(16, 4, 1),
    (16, False, 512): PagedChoice(16, 8, 1),
}
"""By rows of a tile, whether elements have 16 bits, and the width; but for 64 rows over latents, which an H200 computed
in 0.73 of the time of tiles of half as many keys, none spills on sm_90a, as a test sees to.

Stretches over latents are long: what 16 heads leave of one weighs as much as 57 of its keys.
"""

BIASED, TREE, INT4, INT8 = "biased", "tree", "int4", "int8"
TIGHTER: dict[str, dict[tuple[int, bool, int], PagedChoice]] = {
    BIASED: {(64, True, 128): PagedChoice(32, 8, 2), (16, False, 64): PagedChoice(32, 4, 2)},
    TREE: {
        (64, True, 64): PagedChoice(32, 8, 2),
        (64, True, 128): PagedChoice(32, 8, 2),
        (64, True, 256): PagedChoice(16, 8, 2),
        **({(16, True, 128): PagedChoice(64, 8, 3, times=2)} if NEWER else {}),
    },
    INT4: {(64, True, 256): PagedChoice(16, 8, 2)},
    INT8: {
        (16, True, 128): PagedChoice(64, 8, 3, times=2),
        (16, True, 256): PagedChoice(16, 4, 2),
        (64, True, 256): PagedChoice(16, 8, 2),
    }
    if NEWER
    else {},
}
"""Those that differ where learned biases are read for each pair, where bits say which tokens of a tree see one another,
and where a row is read as two: these take registers."""

NARROWEST = 64
WIDE = 512
"""The width of values from which on 64 rows and their sums take all registers, which fewer heads do not repay, and more
than all with Triton 3.9."""
MATRIX = 64
"""Rows that the matrix unit of Hopper takes at once."""


def many(dtype: torch.dtype, group: int, *sizes: int) -> int:
    """Rows of a tile where a request has more than a few, of groups of so many heads over keys and values of these
    sizes."""
    if dtype.itemsize > 2:
        return FEW
    return 32 if power_of_two(max(sizes)) >= WIDE and (NEWER or group < MATRIX) else MATRIX


def choice_of(rows: int, dtype: torch.dtype, *sizes: int, takes: Collection[str] = ()) -> PagedChoice:
    """What is shipped for tiles of so many rows over keys and values of these sizes, with what `takes` registers."""
    kind = rows, dtype.itemsize == 2, max(NARROWEST, power_of_two(max(sizes)))
    tighter = [TIGHTER[what][kind] for what in TIGHTER if what in takes and kind in TIGHTER[what]]
    return tighter[0] if tighter else PAGED_CHOICES[kind]
