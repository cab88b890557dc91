"""Sparse patterns: global tokens, strided and fixed attention, neighbourhoods."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from attn_core.checks import keep_tuples, require_whole
from attn_core.errors import InvalidValue
from attn_core.masks.bands import Causal, Chunked, Window
from attn_core.masks.base import Mask, Positions, told
from attn_core.masks.ranges import Runs, merged, of_keys, run, unite
from attn_core.masks.reach import Reach


@dataclass(frozen=True)
class GlobalKeys(Mask):
    """The keys at `positions` are seen by every query, and no others.

    This is what global tokens add to the windows of the other tokens (Beltagy et al. 2020).
    """

    positions: tuple[int, ...]
    kind = "global"

    def __post_init__(self) -> None:
        keep_tuples(self, "positions")
        if any(position < 0 for position in self.positions):
            raise InvalidValue.of("global.positions", self.positions, "positions from 0")

    def allows(self, query: Positions, key: Positions) -> Any:
        return is_one_of(key, self.positions) & (query == query)

    def reach(self, keys: int | None) -> Reach:
        return Reach.of(0, of_keys(self._positions_below(keys)))

    def runs(self, query: int, keys: int) -> Runs:
        return of_keys(self._positions_below(keys))

    def count(self, queries: int, keys: int) -> int:
        return queries * len(self._positions_below(keys))

    def _positions_below(self, keys: int | None) -> list[int]:
        return sorted({position for position in self.positions if keys is None or position < keys})


@dataclass(frozen=True)
class GlobalTokens(GlobalKeys):
    """The tokens at `positions` are seen by all and see all (Beltagy et al. 2020; Zaheer et al. 2020's global)."""

    def allows(self, query: Positions, key: Positions) -> Any:
        return is_one_of(key, self.positions) | is_one_of(query, self.positions)

    def reach(self, keys: int | None) -> Reach:
        """All keys up to the last global token, which sees everything before it."""
        return Reach.of(0, run(0, max(self._positions_below(keys), default=-1) + 1))

    def runs(self, query: int, keys: int) -> Runs:
        return run(0, keys) if query in self.positions else super().runs(query, keys)

    def count(self, queries: int, keys: int) -> int:
        rows = sum(keys - queries <= position < keys for position in set(self.positions))
        return rows * keys + (queries - rows) * len(self._positions_below(keys))


def is_one_of(position: Positions, positions: tuple[int, ...]) -> Any:
    """Whether each position is one of `positions`."""
    found = position < 0
    for one in positions:
        found = found | (position == one)
    return found & (position >= 0)


@dataclass(frozen=True)
class Earlier(Mask):
    """Every `stride`-th position more than `stride` before the query: what `Strided.column` adds to `Strided.local`."""

    stride: int
    kind = "strided"
    relative = True

    def __post_init__(self) -> None:
        require_whole("strided.stride", self.stride, ge=1)

    def allows(self, query: Positions, key: Positions) -> Any:
        back = query - key
        return (back > self.stride) & (back % self.stride == 0)

    @property
    def lookahead(self) -> int:
        return 0

    @property
    def period(self) -> int:
        return self.stride

    def runs(self, query: int, keys: int) -> Runs:
        return of_keys(range(query % self.stride, min(keys, query - self.stride), self.stride))

    def count(self, queries: int, keys: int) -> int:
        return sum(max(0, query // self.stride - 1) for query in range(max(0, keys - queries), keys))


@dataclass(frozen=True)
class Strided(Mask):
    """Both patterns of strided attention in one (Child et al. 2019, arXiv 1904.10509, section 4.2), causal.

    `local` is A¹ = {max(0, i - l), ..., i}, `column` A² = {j <= i: (i - j) mod l = 0}, for the stride l. With l near √n
    every position is reached from every later one in two steps, and the pairs grow as n √n.
    """

    stride: int
    kind = "strided"
    relative = True

    def __post_init__(self) -> None:
        require_whole("strided.stride", self.stride, ge=1)

    @property
    def local(self) -> Window:
        """A¹, the `stride` positions before a query and its own."""
        return Window(left=self.stride)

    @property
    def column(self) -> Window:
        """A², every `stride`-th position up to a query's own."""
        return Window(left=None, dilation=self.stride)

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.local.allows(query, key) | self.column.allows(query, key)

    @property
    def lookahead(self) -> int:
        return 0

    @property
    def split(self) -> tuple[Mask, ...]:
        return self.local, Earlier(self.stride)

    def runs(self, query: int, keys: int) -> Runs:
        return unite(self.local.runs(query, keys), self.column.runs(query, keys))

    def count(self, queries: int, keys: int) -> int:
        return sum(part.count(queries, keys) for part in self.split)


@dataclass(frozen=True, kw_only=True)
class Summaries(Mask):
    """The last `cells` positions (cells) of every block, up to a query's own: they summarise a block for later ones.

    With a `shift` s, the cells that are s times `cells` before the last ones, so that every head can have its own.
    """

    block: int
    cells: int
    shift: int = 0
    kind = "fixed"

    def __post_init__(self) -> None:
        require_whole("fixed.block", self.block, ge=1)
        require_whole("fixed.summaries", self.cells, ge=1)
        require_whole("fixed.shift", self.shift, ge=0)
        if self.first < 0:
            allowed = f"at most the block's {self.block} cells, shifts included"
            raise InvalidValue.of("fixed.summaries", self.cells * (self.shift + 1), allowed)

    @property
    def first(self) -> int:
        """The first summary cell of a block."""
        return self.block - self.cells * (self.shift + 1)

    def allows(self, query: Positions, key: Positions) -> Any:
        cell = key % self.block
        return (cell >= self.first) & (cell < self.first + self.cells) & (key <= query)

    @property
    def lookahead(self) -> int:
        return 0

    def reach(self, keys: int | None) -> Reach:
        """The summary cells of a bounded context; all keys of an unbounded one."""
        return Reach() if keys is None else Reach.of(0, self.runs(keys - 1, keys))

    def runs(self, query: int, keys: int) -> Runs:
        stop = min(keys, query + 1)
        starts = range(self.first, max(stop, 0), self.block)
        return merged((start, min(stop, start + self.cells)) for start in starts)

    def count(self, queries: int, keys: int) -> int:
        return sum(map(self._before, range(max(0, keys - queries) + 1, keys + 1)))

    def _before(self, stop: int) -> int:
        """The number of summary cells before the position `stop`."""
        blocks, rest = divmod(stop, self.block)
        return blocks * self.cells + min(max(rest - self.first, 0), self.cells)


@dataclass(frozen=True, kw_only=True)
class Fixed(Mask):
    """Both patterns of fixed attention in one (Child et al. 2019, arXiv 1904.10509, section 4.2), causal.

    `local` is A¹ = {j <= i: ⌊j/l⌋ = ⌊i/l⌋}, `column` A² = {j <= i: j mod l >= l - c}, for blocks of l and c summaries.
    """

    block: int
    summaries: int
    kind = "fixed"

    def __post_init__(self) -> None:
        self.column  # noqa: B018 -- checks both numbers

    @property
    def local(self) -> Mask:
        """A¹, a query's own block up to its position."""
        return Chunked(size=self.block) & Causal()

    @property
    def column(self) -> Summaries:
        """A², the summary cells up to a query's position."""
        return Summaries(block=self.block, cells=self.summaries)

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.local.allows(query, key) | self.column.allows(query, key)

    @property
    def lookahead(self) -> int:
        return 0

    def reach(self, keys: int | None) -> Reach:
        return self.local.reach(keys) | self.column.reach(keys)

    def runs(self, query: int, keys: int) -> Runs:
        return unite(self.local.runs(query, keys), self.column.runs(query, keys))

    def count(self, queries: int, keys: int) -> int:
        rows = (divmod(query, self.block) for query in range(max(0, keys - queries), keys))
        return sum(blocks * self.summaries + own + 1 for blocks, own in rows)


@dataclass(frozen=True, kw_only=True)
class Neighbourhood(Mask):
    """A query sees exactly `size` keys: those around it, or the nearest ones at an edge (Hassani et al. 2023).

    arXiv 2204.07143. The first key is clamp(i - ⌊size/2⌋, 0, n - size); of fewer than `size` keys all are seen. With a
    `dilation` d the same holds among the positions that differ from the query's by multiples of d. The mask depends on
    the number of keys `length`; see `over`.
    """

    size: int
    dilation: int = 1
    length: Positions | None = None
    kind = "neighbourhood"

    def __post_init__(self) -> None:
        require_whole("neighbourhood.size", self.size, ge=1)
        require_whole("neighbourhood.dilation", self.dilation, ge=1)

    def allows(self, query: Positions, key: Positions) -> Any:
        length = told("neighbourhood.length", self.length)
        step, residue = self.dilation, query % self.dilation
        own, other = query // step, key // step
        last = (length - residue + step - 1) // step - self.size  # start of the last neighbourhood of this residue
        first = own - self.size // 2
        # key >= clamp(first, 0, last) and key < clamp(first, 0, last) + size, without a clamp.
        begun = (other >= first) | (other >= last)
        ended = (other >= self.size) & (other >= first + self.size)
        return (key % step == residue) & begun & (ended ^ True) & (query >= 0)

    @property
    def lookback(self) -> int:
        return (self.size - 1) * self.dilation

    @property
    def lookahead(self) -> int:
        return (self.size - 1) * self.dilation

    @property
    def by_length(self) -> bool:
        return self.length is None

    @property
    def period(self) -> int:
        return self.dilation

    def over(self, keys: Positions) -> Neighbourhood:
        return self if self.length is not None else dataclasses.replace(self, length=keys)

    def runs(self, query: int, keys: int) -> Runs:
        if query < 0:
            return []
        length, residue = keys if self.length is None else self.length, query % self.dilation
        last = (length - residue + self.dilation - 1) // self.dilation - self.size
        first = max(0, min(max(0, query // self.dilation - self.size // 2), last))
        start, stop = first * self.dilation + residue, min(keys, (first + self.size) * self.dilation)
        return run(start, stop) if self.dilation == 1 else of_keys(range(start, stop, self.dilation))


@dataclass(frozen=True, kw_only=True)
class NeighbourhoodGrid(Mask):
    """`Neighbourhood` along both axes of a plane of `rows` by `columns` cells, which positions fill row by row.

    A query sees exactly size² cells, shifted at the edges (Hassani et al. 2023, arXiv 2204.07143, section 3.1). In a
    sequence shorter than the plane, missing keys are not seen; positions after the plane see nothing.
    """

    size: int
    rows: int
    columns: int
    dilation: int = 1
    kind = "neighbourhood"

    def __post_init__(self) -> None:
        require_whole("neighbourhood.rows", self.rows, ge=1)
        require_whole("neighbourhood.columns", self.columns, ge=1)
        self.down  # noqa: B018 -- checks size and dilation

    @property
    def down(self) -> Neighbourhood:
        """The neighbourhood along a column, of row numbers."""
        return Neighbourhood(size=self.size, dilation=self.dilation, length=self.rows)

    @property
    def across(self) -> Neighbourhood:
        """The neighbourhood along a row, of column numbers."""
        return Neighbourhood(size=self.size, dilation=self.dilation, length=self.columns)

    def allows(self, query: Positions, key: Positions) -> Any:
        near = self.down.allows(query // self.columns, key // self.columns)
        near = near & self.across.allows(query % self.columns, key % self.columns)
        cells = self.rows * self.columns
        return near & (query < cells) & (key < cells)

    @property
    def lookback(self) -> int:
        return self._reach

    @property
    def lookahead(self) -> int:
        return self._reach

    def runs(self, query: int, keys: int) -> Runs:
        if not 0 <= query < self.rows * self.columns:
            return []
        across = self.across.runs(query % self.columns, self.columns)
        down = self.down.runs(query // self.columns, self.rows)
        lines = [row * self.columns for start, stop in down for row in range(start, stop)]
        return merged((line + start, min(keys, line + stop)) for line in lines for start, stop in across)

    @property
    def _reach(self) -> int:
        """The largest distance in positions between a query and a key of its neighbourhood."""
        span = (self.size - 1) * self.dilation
        return min(span, self.rows - 1) * self.columns + min(span, self.columns - 1)
