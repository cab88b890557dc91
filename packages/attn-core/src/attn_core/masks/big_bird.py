"""BigBird: a window, global blocks and random blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from attn_core.checks import require_whole
from attn_core.errors import InvalidValue
from attn_core.masks.base import Mask, Positions, told
from attn_core.masks.ranges import Runs, merged, run

MODULUS = 2**31 - 1
"""A prime; the product of two smaller numbers fits into 64 bits."""


@dataclass(frozen=True, kw_only=True)
class BigBird(Mask):
    """A window of three blocks, the first and last block global, and `random` random blocks per row of blocks and head.

    Zaheer et al. 2020 (arXiv 2007.14062), internal transformer construction. The blocks that are neither in the window
    nor global are divided into `random` equal shares, of each of which `seed` draws one block per row, so that the
    random blocks never overlap with those nor with each other. They depend on the number of keys `length` (see `over`)
    and on the `head` (see `of_head`). Up to (5 + 2 random) blocks of keys, every query sees all, as in the authors'
    code. Without `window` a query sees its own block instead of three, and without `ends` no block is global; then
    short sequences are not dense (the paper's table 1).
    """

    block: int = 64
    random: int = 3
    seed: int = 0
    number_of_heads: int = 1
    window: bool = True
    ends: bool = True
    head: int | None = None
    length: Positions | None = None
    kind = "big_bird"

    def __post_init__(self) -> None:
        require_whole("big_bird.block", self.block, ge=1)
        require_whole("big_bird.random", self.random, ge=0)
        require_whole("big_bird.seed", self.seed, ge=0)
        require_whole("big_bird.number_of_heads", self.number_of_heads, ge=1)

    @property
    def heads(self) -> int | None:
        return self.number_of_heads if self.head is None else None

    @property
    def by_length(self) -> bool:
        return self.length is None

    def over(self, keys: Positions) -> BigBird:
        return self if self.length is not None else dataclasses.replace(self, length=keys)

    def of_head(self, head: int) -> BigBird:
        return self if self.head is not None else dataclasses.replace(self, head=head)

    @property
    def dense_below(self) -> int:
        """The largest number of keys for which every query sees all keys."""
        return (5 + 2 * self.random) * self.block if self.window and self.ends else 0

    def allows(self, query: Positions, key: Positions) -> Any:
        length = told("big_bird.length", self.length)
        row, column, last = query // self.block, key // self.block, (length - 1) // self.block
        near = (column - row <= 1) & (row - column <= 1)
        seen = near if self.window else column == row
        if self.ends:
            seen = seen | (column == 0) | (column == last) | (row == 0) | (row == last)
        inner = (column >= 1) & (column < last) & (row >= 1) & (row < last) & (near ^ True)
        # Blocks that may be drawn are ranked: those right of the window move up by the excluded blocks.
        rank = column - 1 - (column > row) * self._num_excluded(row, last)
        for share in range(self.random):
            seen = seen | (inner & (rank == self._drawn_rank(row, last, share)))
        return seen | (length <= self.dense_below)

    def runs(self, query: int, keys: int) -> Runs:
        length = keys if self.length is None else self.length
        return list(_runs_of_row(self, query // self.block, keys, length))

    def runs_of_row(self, row: int, keys: int, length: int) -> Runs:
        """The keys, of `keys` in all, that every query of a row of blocks sees in a sequence of `length`."""
        last = (length - 1) // self.block
        if length <= self.dense_below or (self.ends and row in {0, last}):
            return run(0, keys)
        columns = ({0, last} if self.ends else set()) | ({row - 1, row, row + 1} if self.window else {row})
        for share in range(self.random if 0 < row < last else 0):
            rank = self._drawn_rank(row, last, share)
            column = rank + 1 if rank + 1 < row - 1 else rank + 1 + self._num_excluded(row, last)
            if 0 < column < last and abs(column - row) > 1:
                columns.add(column)
        places = sorted(column for column in columns if 0 <= column <= last)
        return merged((column * self.block, min(keys, (column + 1) * self.block)) for column in places)

    def count(self, queries: int, keys: int) -> int:
        if self.heads is None:
            return super().count(queries, keys)
        return sum(self.of_head(head).count(queries, keys) for head in range(self.heads))

    def _num_excluded(self, row: Positions, last: Positions) -> Any:
        """The number of blocks from 1 to `last`, exclusive, that are in the window of block `row`."""
        return 3 - (row == 1) * 1 - (row == last - 1) * 1

    def _drawn_rank(self, row: Positions, last: Positions, share: int) -> Any:
        """The rank, among the blocks that may be drawn, of the one that is drawn for a row from a share."""
        if self.head is None:
            raise InvalidValue.of("big_bird.head", self.head, "the index of a head, set by mask.of_head(head)")
        blocks = last - 1 - self._num_excluded(row, last)
        first, stop = share * blocks // self.random, (share + 1) * blocks // self.random
        width = stop - first
        # Avoids a division by zero where a share is empty; nothing is drawn there, because `inner` is false.
        width = width * (width > 0) + (width <= 0) * 1
        return first + scrambled(row * (row > 0), self.seed, self.head, share) % width


@lru_cache(maxsize=4096)
def _runs_of_row(mask: BigBird, row: int, keys: int, length: int) -> tuple[tuple[int, int], ...]:
    return tuple(mask.runs_of_row(row, keys, length))


def scrambled(number: Positions, *salt: int) -> Any:
    """Hash whole numbers from 0 to a pseudo-random number below 2^31, equally for ints and tensors."""
    mixed = number % MODULUS + 1
    for grain in (*salt, 0):
        mixed = (mixed * 48271 + grain) % MODULUS
        mixed = (mixed ^ (mixed >> 15)) * 69621 % MODULUS
    return mixed
