"""Which pages of the pool each request holds, for all states of one window."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

PAGE = 16
"""Tokens of one page, where a store does not say otherwise."""


@dataclass
class Table:
    """The pages of one request, `size` tokens each: `pages[i]` holds the positions of page number `first + i`."""

    size: int
    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after the last one that has room."""
        return (self.first + len(self.pages)) * self.size

    def row(self, position: int) -> int:
        """The row of the pool that holds a position."""
        return self.pages[position // self.size - self.first] * self.size + position % self.size


class PageGroup:
    """The pages of all states of one window. Page 0 belongs to nobody and stays zero: padding is read from it.

    Several requests may hold a page, which none of them writes any more, and it may be *kept* beyond them.
    """

    def __init__(self, window: int | None, pages: int, size: int = PAGE) -> None:
        self.window = window
        self.pages = pages
        self.size = size
        self.tables: list[Table] = []
        # The lowest page first: requests that run alone get neighbouring pages, which can be read in place.
        self._free = list(range(1, pages + 1))
        self._holders = [0] * (pages + 1)
        self._kept: set[int] = set()
        self._idle = 0

    @property
    def taken(self) -> int:
        """Pages that requests hold."""
        return self.pages - len(self._free) - self._idle

    @property
    def idle(self) -> int:
        """Pages that are kept though no request holds them."""
        return self._idle

    def open(self) -> None:
        """Add a request that holds nothing."""
        self.tables.append(Table(self.size))

    def missing(self, place: int, tokens: int) -> int:
        """Pages to take before the request at `place` has room for positions up to `tokens`."""
        return max(0, -(-(tokens - self.tables[place].end) // self.size))

    def can_take(self, pages: int) -> bool:
        """Whether this many pages are free."""
        return pages <= len(self._free)

    def take(self, place: int, pages: int) -> None:
        """Give the request so many pages more."""
        taken = [heapq.heappop(self._free) for _ in range(pages)]
        for page in taken:
            self._holders[page] = 1
        self.tables[place].pages += taken

    def share(self, place: int, first: int, pages: list[int]) -> None:
        """Give a request that holds nothing these kept pages, from page number `first` of its sequence on."""
        for page in pages:
            self._idle -= self._holders[page] == 0
            self._holders[page] += 1
        self.tables[place] = Table(self.size, first, list(pages))

    def fork(self, place: int, tokens: int) -> tuple[int, int] | None:
        """Add a request that shares the whole pages of another's first `tokens` positions.

        The page that either would write next is taken anew: the page to copy and its copy, None where there is none.
        """
        table = self.tables[place]
        whole, partial = tokens // self.size - table.first, tokens % self.size > 0
        shared = table.pages[:whole]
        for page in shared:
            self._holders[page] += 1
        self.tables.append(Table(self.size, table.first, list(shared)))
        if not partial:
            return None
        self.take(len(self.tables) - 1, 1)
        return table.pages[whole], self.tables[-1].pages[-1]

    def keep(self, page: int) -> None:
        """Keep a page that a request holds, also when no request does any more."""
        self._kept.add(page)

    def let_go(self, page: int) -> None:
        """Keep the page no longer."""
        self._kept.remove(page)
        if self._holders[page] == 0:
            self._idle -= 1
            heapq.heappush(self._free, page)

    def drop_before(self, place: int, position: int) -> None:
        """Give back the pages that end before `position`."""
        table, behind = self.tables[place], self._behind(place, position)
        self._give_back(table.pages[:behind])
        del table.pages[:behind]
        table.first += behind

    def cut(self, place: int, position: int) -> None:
        """Give back the pages from the one that holds `position` on, which is the next to be taken."""
        table, number = self.tables[place], position // self.size
        held = max(0, number - table.first)
        self._give_back(table.pages[held:])
        del table.pages[held:]
        table.first = min(table.first, number)

    def would_free(self, place: int, position: int) -> int:
        """Pages that `drop_before` would make free for others."""
        return sum(page not in self._kept for page in self.left_behind(place, position))

    def left_behind(self, place: int, position: int) -> list[int]:
        """Pages that end before `position` and that no other request holds; some may be kept."""
        behind = self.tables[place].pages[: self._behind(place, position)]
        return [page for page in behind if self._holders[page] == 1]

    def close(self, place: int) -> None:
        """Give back all pages of the request; the last request takes over its place."""
        self._give_back(self.tables[place].pages)
        last = self.tables.pop()
        if place < len(self.tables):
            self.tables[place] = last

    def _behind(self, place: int, position: int) -> int:
        table = self.tables[place]
        return max(0, min(position // self.size - table.first, len(table.pages)))

    def _give_back(self, pages: list[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._kept:
                    self._idle += 1
                else:
                    heapq.heappush(self._free, page)
