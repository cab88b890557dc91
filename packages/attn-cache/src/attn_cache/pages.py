"""Which pages of the pool each request holds, for all states of one window."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

PAGE = 16
"""Tokens of one page."""


@dataclass
class Table:
    """The pages of one request: `pages[i]` holds the positions of page number `first + i`."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after the last one that has room."""
        return (self.first + len(self.pages)) * PAGE


class PageGroup:
    """The pages of all states of one window. Page 0 belongs to nobody and stays zero: padding is read from it."""

    def __init__(self, window: int | None, pages: int) -> None:
        self.window = window
        self.pages = pages
        self.tables: list[Table] = []
        # The lowest page first: requests that run alone get neighbouring pages, which can be read in place.
        self._free = list(range(1, pages + 1))

    @property
    def taken(self) -> int:
        """Pages that requests hold."""
        return self.pages - len(self._free)

    def open(self) -> None:
        """Add a request that holds nothing."""
        self.tables.append(Table())

    def missing(self, place: int, tokens: int) -> int:
        """Pages to take before the request at `place` has room for positions up to `tokens`."""
        return max(0, -(-(tokens - self.tables[place].end) // PAGE))

    def can_take(self, pages: int) -> bool:
        """Whether this many pages are free."""
        return pages <= len(self._free)

    def take(self, place: int, pages: int) -> None:
        """Give the request so many pages more."""
        self.tables[place].pages += [heapq.heappop(self._free) for _ in range(pages)]

    def drop_before(self, place: int, position: int) -> None:
        """Free the pages that end before `position`."""
        table = self.tables[place]
        behind = min(position // PAGE - table.first, len(table.pages))
        if behind > 0:
            self._give_back(table.pages[:behind])
            del table.pages[:behind]
            table.first += behind

    def close(self, place: int) -> None:
        """Free all pages of the request; the last request takes over its place."""
        self._give_back(self.tables[place].pages)
        last = self.tables.pop()
        if place < len(self.tables):
            self.tables[place] = last

    def _give_back(self, pages: list[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)
