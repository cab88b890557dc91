"""Launch parameters (tile sizes, warps, stages) of the paged kernels."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from attn_kernels_triton.attention.tiles import NEWER
from attn_kernels_triton.launch import power_of_two

SMALL_TILE = 16
"""The rows (heads of a group times tokens) of the small tile, for requests that have no more."""


class Heads(NamedTuple):
    """The head layout and the splitting of contexts: query heads per key/value head (`group`), key/value heads
    (`owners`), rows of the large tile (`large_tile`), the factor on the usual split length (`times`), and the number of
    splits `wanted` for all requests together, 0 if each request is split on its own."""

    group: int
    owners: int
    large_tile: int
    times: int = 1
    wanted: int = 0


class PagedChoice(NamedTuple):
    """Launch parameters: keys of a tile, warps, stages of the software pipeline, the factor on the split length
    (`times`) where each request is split on its own, and the `programs` per multiprocessor where a whole bucket is
    split."""

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
"""By rows of a tile, whether elements have 16 bits, and the width; none spills registers on sm_90a, which a test
checks, except 64 rows over latents, which on an H200 took 0.73 of the time of tiles of half as many keys.

Splits over latents are long: the partial results of 16 heads of one are as large as 57 of its keys.
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
"""Replaces `PAGED_CHOICES` for features that take registers: learned biases, draft trees with mask bits, and quantized
rows, by feature."""

NARROWEST = 64
WIDE = 512
"""The width of values from which on 64 rows and their sums take all registers, which does not pay for fewer heads, and
exceed them with Triton 3.9."""
MATRIX = 64
"""The number of rows of Hopper's matrix instructions."""


def large_tile(dtype: torch.dtype, group: int, *sizes: int) -> int:
    """The rows of the large tile, for groups of `group` heads over keys and values of these sizes."""
    if dtype.itemsize > 2:
        return SMALL_TILE
    return 32 if power_of_two(max(sizes)) >= WIDE and (NEWER or group < MATRIX) else MATRIX


def choice_of(rows: int, dtype: torch.dtype, *sizes: int, takes: Collection[str] = ()) -> PagedChoice:
    """The default launch parameters for tiles of `rows` rows over keys and values of these sizes.

    `takes` are the features in use that take registers, see `TIGHTER`.
    """
    kind = rows, dtype.itemsize == 2, max(NARROWEST, power_of_two(max(sizes)))
    tighter = [TIGHTER[what][kind] for what in TIGHTER if what in takes and kind in TIGHTER[what]]
    return tighter[0] if tighter else PAGED_CHOICES[kind]
