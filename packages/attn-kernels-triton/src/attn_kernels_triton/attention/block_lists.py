"""Lists of the non-empty blocks of a mask, computed in closed form if the mask has one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from attn_core import Mask
from attn_core.graph_safety import device_cache
from attn_core.masks import blocks
from torch import Tensor

from attn_kernels_triton.kernels.arguments import Blocks
from attn_kernels_triton.launch import integers

WHOLE = 0
"""The slot of all full blocks, in which every pair is allowed."""

AT_ONCE = 1 << 24
"""The number of query-key pairs for which the mask is evaluated at once."""


class Entry(NamedTuple):
    """A non-empty block: its head, its block row and column, and its slot (`WHOLE` if it is full)."""

    head: int
    row: int
    column: int
    slot: int


class Lists(NamedTuple):
    """The non-empty blocks of a mask, listed by block row (`by_query`) and by block column (`by_key`)."""

    by_query: Blocks
    by_key: Blocks


class Grid(NamedTuple):
    """The numbers of queries and keys, aligned at their ends, and the size of a block."""

    queries: int
    keys: int
    size: int

    @property
    def rows(self) -> int:
        """The number of block rows."""
        return -(-self.queries // self.size)

    @property
    def columns(self) -> int:
        """The number of block columns."""
        return -(-self.keys // self.size)


@device_cache(64)
def lists_of(mask: Mask, grid: Grid, group: int, device: torch.device) -> Lists:
    """The block lists of a mask, with `group` query heads per key/value head.

    A block that extends beyond the last query or key is partial.
    """
    bound = mask.over(grid.keys)
    heads = [bound] if bound.heads is None else [bound.of_head(head) for head in range(bound.heads)]
    entries: list[Entry] = []
    # The first slot is a block in which every pair is allowed.
    bits = [torch.full((1, grid.size, grid.size // 32), -1, dtype=torch.int32, device=device)]
    for head, one in enumerate(heads):
        found, words = entries_of(one, grid, device)
        first = sum(map(len, bits))
        # Slots of one head are counted from 1.
        entries += [Entry(head, r, c, slot if slot == WHOLE else first + slot - 1) for _, r, c, slot in found]
        bits.append(words)
    packed = torch.cat(bits)
    return Lists(
        by_query=listed_by_query(entries, grid, packed, bound.heads),
        by_key=listed_by_key(entries, grid, packed, None if bound.heads is None else (bound.heads // group, group)),
    )


def entries_of(mask: Mask, grid: Grid, device: torch.device) -> tuple[list[Entry], Tensor]:
    """The blocks of a mask of one head, and the bits [slot, size, size / 32], int32, of its partial blocks."""
    full, partial = closed_layout(mask, grid) if mask.closed else (set(), set(every_block(grid)))
    ordered = sorted(partial)
    bits = torch.empty(len(ordered), grid.size, grid.size // 32, dtype=torch.int32, device=device)
    some, at_once = torch.empty(len(ordered), dtype=torch.bool, device=device), max(1, AT_ONCE // grid.size**2)
    for start in range(0, len(ordered), at_once):
        seen = pairs_of(mask, grid, ordered[start : start + at_once], device)
        some[start : start + at_once] = seen.flatten(1).any(1)
        bits[start : start + at_once] = packed_bits(seen)
    kept = [Entry(0, *place, slot) for slot, place in enumerate(ordered, start=WHOLE + 1)]
    seen_kept = [entry for entry, any_seen in zip(kept, some.tolist(), strict=True) if any_seen]
    return sorted([*(Entry(0, *place, WHOLE) for place in full), *seen_kept], key=lambda entry: entry[:3]), bits


def every_block(grid: Grid) -> Iterator[tuple[int, int]]:
    """The row and column of every block."""
    return ((row, column) for row in range(grid.rows) for column in range(grid.columns))


def closed_layout(mask: Mask, grid: Grid) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """The full and the partial blocks, as (row, column), of a mask with a closed form."""
    layout = blocks(mask, grid.queries, grid.keys, grid.size)
    full = {(row, column) for row, columns in enumerate(layout.full) for column in columns}
    partial = {(row, column) for row, columns in enumerate(layout.partial) for column in columns}
    cut = {(row, column) for row, column in full if (column + 1) * grid.size > grid.keys}
    return full - cut, partial | cut


def pairs_of(mask: Mask, grid: Grid, places: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Bool [block, size, size]: which pairs of the blocks at `places` (row, column) exist and are allowed."""
    place = torch.tensor(places, dtype=torch.int64, device=device).view(-1, 2)
    along = torch.arange(grid.size, device=device)
    row = (place[:, :1] * grid.size + along)[:, :, None]
    key = (place[:, 1:] * grid.size + along)[:, None, :]
    query = row.clamp(max=grid.queries - 1) + (grid.keys - grid.queries)
    inside = (row < grid.queries) & (key < grid.keys)
    seen: Tensor = mask.allows(query, key.clamp(max=grid.keys - 1))
    return inside & seen


def packed_bits(seen: Tensor) -> Tensor:
    """Pack bool [block, size, size] into words [block, size, size / 32], int32; bit b of word w is for key 32 w + b."""
    words = seen.reshape(*seen.shape[:-1], -1, 32).long() << torch.arange(32, device=seen.device)
    total = words.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def listed_by_query(entries: list[Entry], grid: Grid, bits: Tensor, heads: int | None) -> Blocks:
    """The lists of block rows; if masks differ per head, those of the `heads` heads one after another."""
    full: list[list[Entry]] = [[] for _ in range(grid.rows * (heads or 1))]
    partial: list[list[Entry]] = [[] for _ in full]
    for entry in entries:
        chosen = full if entry.slot == WHOLE else partial
        chosen[entry.head * grid.rows + entry.row].append(entry)
    return Blocks(
        full_starts=starts(full, bits),
        full=integers([entry.column for row in full for entry in row], bits),
        partial_starts=starts(partial, bits),
        partial=integers([entry.column for row in partial for entry in row], bits),
        slots=integers([entry.slot for row in partial for entry in row], bits),
        bits=bits,
        heads=None if heads is None else grid.rows,
        group_heads=None,
        size=grid.size,
    )


def listed_by_key(entries: list[Entry], grid: Grid, bits: Tensor, shared: tuple[int, int] | None) -> Blocks:
    """The lists of block columns; if masks differ per head, `shared` is the number of key/value heads and the number of
    query heads of each."""
    owners, group = shared or (1, 1)
    by_column: list[list[Entry]] = [[] for _ in range(owners * grid.columns)]
    for entry in entries:
        by_column[entry.head // group * grid.columns + entry.column].append(entry)
    ordered = [entry for column in by_column for entry in column]
    return Blocks(
        full_starts=None,
        full=None,
        partial_starts=starts(by_column, bits),
        partial=integers([entry.row for entry in ordered], bits),
        slots=integers([entry.slot for entry in ordered], bits),
        bits=bits,
        heads=None if shared is None else grid.columns,
        group_heads=None if shared is None else integers([entry.head % group for entry in ordered], bits),
        size=grid.size,
    )


def with_map(lists: Blocks, keys: int) -> Blocks:
    """The lists of block rows over `keys` keys, with the slot of every block in `map`."""
    columns = -(-keys // lists.size)
    found = torch.full((len(lists.full_starts) - 1, columns), -1, dtype=torch.int32, device=lists.bits.device)
    rows = torch.arange(len(found), device=found.device)
    found[rows.repeat_interleave(lists.full_starts.diff()), lists.full.long()] = WHOLE
    found[rows.repeat_interleave(lists.partial_starts.diff()), lists.partial.long()] = lists.slots
    return lists._replace(map=found)


def starts(lists: list[list[Entry]], like: Tensor) -> Tensor:
    """The offset of each list in their concatenation, and the end of the last one."""
    return integers([0, *accumulate(map(len, lists))], like)
