"""One step over pages: row numbers to write and to read, computed once for all layers of a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from attn_core import Fields, RaggedBatch
from attn_core.batch import Rows, RowsInPlace
from torch import Tensor

from attn_cache.bank import check_names, check_shape
from attn_cache.pages import Table
from attn_cache.rows import first_visible
from attn_cache.step import RowsStep, located

if TYPE_CHECKING:
    from attn_cache.paged import PagedRows


@dataclass(frozen=True, eq=False)
class Selection:
    """What some requests see under one window: row numbers in the pool [requests, longest], padded with row 0.

    `run` replaces the numbers where they are consecutive.
    """

    positions: Tensor
    keep: Tensor | None
    numbers: Tensor
    run: slice | None

    def rows(self, memory: Mapping[str, Tensor]) -> Rows:
        """These rows of the fields of one state."""
        return Rows(
            fields={name: self._of(rows) for name, rows in memory.items()}, positions=self.positions, keep=self.keep
        )

    def _of(self, rows: Tensor) -> Tensor:
        if self.run is not None:
            return rows[None, self.run]
        return rows.index_select(0, self.numbers.flatten()).view(*self.numbers.shape, *rows.shape[1:])


class PagedStep(RowsStep["PagedRows", Selection]):
    """The requests of one step; `view` gives a layer its rows."""

    def __init__(self, owner: PagedRows, places: Sequence[int], batch: RaggedBatch) -> None:
        super().__init__(owner, places, batch)
        self._targets: dict[int | None, Tensor] = {}
        self._in_place: dict[int | None, tuple[Tensor, Tensor, tuple[int, ...]]] = {}

    def view(self, layer: str, state: str) -> PagesView:
        """What one layer sees of one of its states."""
        return PagesView(self, layer, state)

    def targets(self, window: int | None) -> Tensor:
        """The row numbers [tokens] of the new rows; the same for all layers of one window."""
        found = self._targets.get(window)
        if found is None:
            group = self.owner.groups[window]
            numbers: list[int] = []
            for request, place in enumerate(self.places):
                numbers += map(group.tables[place].row, self.batch.places(request))
            found = self._targets[window] = torch.tensor(numbers, dtype=torch.int64, device=self.owner.device)
        return found

    def in_place(self, window: int | None, memory: Fields) -> RowsInPlace:
        """Where these fields of all requests of the batch lie; found once for all layers of a window."""
        if window not in self._in_place:
            found = self.select(window, range(self.batch.requests))
            numbers = found.numbers
            if found.run is not None:
                numbers = torch.arange(found.run.start, found.run.stop, device=self.owner.device)[None]
            firsts = tuple(first_visible(context, window) for context in self.batch.contexts)
            self._in_place[window] = self.targets(window), numbers, firsts
        return RowsInPlace(memory, *self._in_place[window])

    def _select(self, window: int | None, requests: tuple[int, ...]) -> Selection:
        group = self.owner.groups[window]
        firsts = [first_visible(self.batch.contexts[r], group.window) for r in requests]
        ends = [self.batch.contexts[r] + self.batch.lengths[r] for r in requests]
        longest = max(end - first for first, end in zip(firsts, ends, strict=True))
        bounds = torch.tensor([firsts, ends], device=self.owner.device)
        positions = bounds[0, :, None] + torch.arange(longest, device=self.owner.device)
        real = positions < bounds[1, :, None]
        tables = [group.tables[self.places[r]] for r in requests]
        if len(requests) == 1 and not self.batch.path(requests[0]):
            start = _run(tables[0], firsts[0] - tables[0].first * group.size, longest)
            if start is not None:
                return Selection(positions, None, positions, slice(start, start + longest))
        widest = max(len(table.pages) for table in tables)
        pages = torch.tensor(
            [table.pages + [0] * (widest - len(table.pages)) for table in tables], device=self.owner.device
        )
        shift = torch.tensor([table.first for table in tables], device=self.owner.device)
        # Positions past a request's end may lie past its table; they read row 0 whatever page is looked up.
        places = located(self.batch, requests, positions, firsts)
        number = (places // group.size - shift[:, None]).clamp_(max=widest - 1)
        numbers = (pages.gather(1, number) * group.size + places % group.size).where(real, 0)
        return Selection(positions, None if bool(real.all()) else real, numbers, None)


def _run(table: Table, offset: int, rows: int) -> int | None:
    """The row number of the first of `rows` rows from `offset` if they are consecutive in the pool."""
    pages, size = table.pages, table.size
    first, last = offset // size, (offset + rows - 1) // size
    if pages[last] - pages[first] != last - first or pages[first : last + 1] != list(
        range(pages[first], pages[last] + 1)
    ):
        return None
    return pages[first] * size + offset % size


class PagesView:
    """What one layer sees of one state; implements `attn_core.batch.PagedView`."""

    def __init__(self, step: PagedStep, layer: str, state: str) -> None:
        self._step = step
        self._key = (layer, state)
        self._window = step.owner.windows[self._key]
        self._memory = step.owner.memory[self._key]

    def append(self, fields: Fields) -> Fields:
        """Remember this step's rows, [tokens, ...] each; raises `InvalidValue` for other fields or shapes."""
        check_names(".".join(self._key), fields, self._memory)
        targets = self._step.targets(self._window)
        for name, memory in self._memory.items():
            rows = fields[name]
            check_shape(".".join((*self._key, name)), rows, (self._step.tokens, *memory.shape[1:]))
            memory.index_copy_(0, targets, rows.detach().to(memory.dtype))
        return fields

    def rows(self, requests: Sequence[int]) -> Rows:
        """All rows these requests of the batch can see, [requests, longest, ...] each, padded with zeros."""
        return self._step.select(self._window, requests).rows(self._memory)

    def in_place(self) -> RowsInPlace:
        """Where the rows of all requests of the batch lie."""
        return self._step.in_place(self._window, self._memory)
