"""Neighbourhoods in a plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.mask.checks import at_least
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.neighbourhood import Neighbourhood
from attn_core.mask.runs import Runs, merged


@dataclass(frozen=True, kw_only=True)
class NeighbourhoodGrid(Mask):
    """`Neighbourhood` along both axes of a plane of `rows` by `columns` cells, which positions fill row by row.

    A query sees exactly size² cells, shifted at the edges (Hassani et al. 2023, arXiv 2204.07143, section 3.1). Keys
    that a shorter sequence lacks are not seen; positions behind the plane see nothing.
    """

    size: int
    rows: int
    columns: int
    dilation: int = 1
    kind = "neighbourhood"

    def __post_init__(self) -> None:
        at_least("neighbourhood.rows", self.rows, 1)
        at_least("neighbourhood.columns", self.columns, 1)
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
        """The distance of two cells as far apart as a neighbourhood holds, in positions."""
        span = (self.size - 1) * self.dilation
        return min(span, self.rows - 1) * self.columns + min(span, self.columns - 1)
