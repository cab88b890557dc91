"""Token rows in pages that requests take as they grow; one page number serves all layers of a window.

Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv 2309.06180.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attn_core import Field, RaggedBatch
from attn_core.errors import WrongState
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor

from attn_cache.bank import Bank, Key, banks, by_state, tensors_of
from attn_cache.paged_step import PagedStep
from attn_cache.pages import PAGE, PageGroup
from attn_cache.rows import TokenStep, fields_of, first_visible, windows_of
from attn_cache.zeros import lazy_zeros


class PagedRows:
    """Token rows of all layers; implements `attn_cache.rows.TokenRows`.

    States of one window share page tables; a page wholly behind the window goes back to the pool. Each window has as
    many pages as all `size.tokens` need. Freed pages keep their old rows: a read never looks past the rows that its
    own request has written.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, page: int = PAGE) -> None:
        self.page = page
        self.pages = -(-size.tokens // page)
        self.device = torch.device(size.device)
        self.windows = windows_of(specs)
        self.groups = {window: PageGroup(window, self.pages, page) for window in set(self.windows.values())}
        self.banks: dict[int | None, list[Bank]] = {
            window: banks(fields_of(specs, window), size.dtype, self._allocate) for window in self.groups
        }
        self.memory = by_state(tensors_of([bank for held in self.banks.values() for bank in held]))
        self._computed: list[int] = []
        self._unlimited = self.groups[None] if set(self.groups) == {None} else None

    @property
    def taken(self) -> int:
        """Tokens of the taken pages, of the window that has most."""
        return self.page * max((group.taken for group in self.groups.values()), default=0)

    @property
    def total(self) -> int:
        """Tokens of all pages of a window."""
        return self.page * self.pages

    def fits(self, tokens: int) -> bool:
        """Whether the request needs no more than all pages."""
        return not self.groups or tokens <= self.total

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether all need no more than all pages, each its own."""
        return not self.groups or requests * -(-tokens // self.page) <= self.pages

    def open(self) -> None:
        """Add an empty request at the next place."""
        self._computed.append(0)
        for group in self.groups.values():
            group.open()

    def reserve(self, place: int, tokens: int) -> bool:
        """Take the pages that are missing in every window, or none; those behind a window make room for them."""
        # Nothing to take, and no window behind which something may be given back.
        if self._unlimited is not None and tokens <= self._unlimited.tables[place].end:
            return True
        needs = [
            (group, group.missing(place, tokens), first_visible(self._computed[place], group.window))
            for group in self.groups.values()
        ]
        if not all(group.can_take(pages - group.would_free(place, first)) for group, pages, first in needs):
            return False
        for group, pages, first in needs:
            group.drop_before(place, first)
            group.take(place, pages)
        return True

    def would_fit(self, place: int, tokens: int) -> bool:
        """Whether `reserve` would succeed if every page that only `keep` holds were let go."""
        context = self._computed[place]
        return all(
            group.can_take(
                group.missing(place, tokens)
                - group.idle
                - len(group.left_behind(place, first_visible(context, group.window)))
            )
            for group in self.groups.values()
        )

    def would_fork(self, tokens: int) -> bool:
        """Whether `fork` would succeed if every page that only `keep` holds were let go."""
        return tokens % self.page == 0 or all(group.can_take(1 - group.idle) for group in self.groups.values())

    def fork(self, place: int, tokens: int) -> bool:
        """Share the whole pages of the first `tokens` rows, and copy the page that is not full."""
        if tokens % self.page and not all(group.can_take(1) for group in self.groups.values()):
            return False
        self._computed.append(tokens)
        for window, group in self.groups.items():
            copied = group.fork(place, tokens)
            if copied is not None:
                self._copy_page(window, *copied)
        return True

    def rewind(self, place: int, tokens: int) -> None:
        """Let the rows from position `tokens` on be written again."""
        self._computed[place] = tokens

    def only_chains(self) -> str | None:
        """None: rows may lie anywhere."""
        return None

    def move(self, place: int, sources: Sequence[int], start: int) -> None:
        """Let the rows at these positions lie side by side from position `start` on."""
        for window, group in self.groups.items():
            table = group.tables[place]
            taken = torch.tensor([table.row(position) for position in sources], device=self.device)
            given = torch.tensor([table.row(start + n) for n in range(len(sources))], device=self.device)
            for bank in self.banks[window]:
                bank.rows[:, given] = bank.rows[:, taken]

    def keep(self, place: int, number: int) -> dict[int | None, int]:
        """Keep page number `number` of the request in every window that still has it; these pages by window."""
        held = {}
        for window, group in self.groups.items():
            table = group.tables[place]
            if 0 <= number - table.first < len(table.pages):
                held[window] = table.pages[number - table.first]
                group.keep(held[window])
        return held

    def let_go(self, pages: Mapping[int | None, int]) -> None:
        """Keep these pages, by window, no longer."""
        for window, page in pages.items():
            self.groups[window].let_go(page)

    def adopt(self, place: int, tokens: int, blocks: Sequence[Mapping[int | None, int]]) -> None:
        """Give the empty request at `place` the kept pages of its first `tokens` positions, as far as windows see."""
        for window, group in self.groups.items():
            first = first_visible(tokens, window) // self.page
            group.share(place, first, [block[window] for block in blocks[first:]])
        self._computed[place] = tokens

    def close(self, place: int) -> None:
        """Free the request at `place`; the request at the last place takes it over."""
        for group in self.groups.values():
            group.close(place)
        last = self._computed.pop()
        if place < len(self._computed):
            self._computed[place] = last

    def step(self, places: Sequence[int], batch: RaggedBatch) -> TokenStep:
        """One step of the requests at these places; raises `WrongState` for rows that are not held."""
        self._begin(places, batch)
        return PagedStep(self, places, batch)

    def read(self, place: int, tokens: int) -> dict[Key, Tensor]:
        """The rows [rows, ...] of the first `tokens` positions that the next token can see."""
        if tokens > self._computed[place] and self.groups:
            raise WrongState(f"the rows of {tokens} tokens are needed, {self._computed[place]} are computed")
        numbers = {window: self._numbers(window, place, tokens) for window in self.groups}
        return {
            (*state, name): rows.index_select(0, numbers[self.windows[state]])
            for state, fields in self.memory.items()
            for name, rows in fields.items()
        }

    def begin(self, place: int, tokens: int) -> None:
        """Let the empty request at `place` continue after `tokens` tokens; a window needs no page behind it."""
        self._computed[place] = tokens
        for window, group in self.groups.items():
            group.share(place, first_visible(tokens, window) // self.page, [])

    def write(self, place: int, tokens: int, rows: Mapping[Key, Tensor]) -> None:
        """Put what `read` gave elsewhere into the reserved rows."""
        numbers = {window: self._numbers(window, place, tokens) for window in self.groups}
        for (layer, state, name), given in rows.items():
            self.memory[layer, state][name].index_copy_(0, numbers[self.windows[layer, state]], given.to(self.device))

    def live_bytes(self, place: int, tokens: int) -> int:
        """Bytes of the last `window` of `tokens` rows of every field, as far as pages hold them."""
        total = 0
        for state, fields in self.memory.items():
            group = self.groups[self.windows[state]]
            table = group.tables[place]
            first = 0 if group.window is None else max(0, tokens - group.window)
            held = max(0, min(tokens, table.end) - max(first, table.first * self.page))
            total += sum(held * rows[0].nbytes for rows in fields.values())
        return total

    def _numbers(self, window: int | None, place: int, tokens: int) -> Tensor:
        table, first = self.groups[window].tables[place], first_visible(tokens, window)
        if first < table.first * self.page or tokens > table.end:
            held = f"{table.first * self.page} to {table.end - 1}"
            raise WrongState(f"positions {first} to {tokens - 1} are needed, {held} are held")
        positions = torch.arange(first, tokens, device=self.device)
        pages = torch.tensor(table.pages, dtype=torch.int64, device=self.device)
        return pages[positions // self.page - table.first] * self.page + positions % self.page

    def _copy_page(self, window: int | None, source: int, copy: int) -> None:
        for bank in self.banks[window]:
            bank.rows[:, self._rows_of(copy)] = bank.rows[:, self._rows_of(source)]

    def _rows_of(self, page: int) -> slice:
        return slice(page * self.page, (page + 1) * self.page)

    def _begin(self, places: Sequence[int], batch: RaggedBatch) -> None:
        for request, place in enumerate(places):
            end = batch.end(request)
            for group in self.groups.values():
                table = group.tables[place]
                first = first_visible(batch.contexts[request], group.window)
                if end > table.end or first < table.first * self.page:
                    held = f"{table.first * self.page} to {table.end - 1}"
                    raise WrongState(f"positions {first} to {end - 1} are needed, {held} are reserved")
            self._computed[place] = end

    def _allocate(self, count: int, field: Field, dtype: torch.dtype) -> Tensor:
        return lazy_zeros((count, (1 + self.pages) * self.page, *field.shape), dtype, self.device)
