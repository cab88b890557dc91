"""One step over contiguous rows: where rows are written and what is read, computed once for all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from attn_core import Fields, RaggedBatch
from attn_core.batch import Rows, RowsInPlace
from torch import Tensor

from attn_cache.bank import Key, by_state, check_names, check_shape
from attn_cache.rows import first_visible
from attn_cache.step import RowsStep, located

if TYPE_CHECKING:
    from attn_cache.contiguous import ContiguousRows


@dataclass(frozen=True, eq=False)
class Selection:
    """What some requests see under one window: padded positions, which of them are real, and the memory.

    `gather` [requests] picks requests out of the memory where they do not lie side by side; with positions
    [requests, longest] too, rows of a tree.
    """

    positions: Tensor
    keep: Tensor | None
    memory: Mapping[tuple[str, str], Fields]
    gather: Tensor | tuple[Tensor, Tensor] | None

    def rows(self, state: tuple[str, str]) -> Rows:
        """The rows of one state of one layer."""
        fields = self.memory[state]
        if isinstance(self.gather, tuple):
            fields = {name: rows[self.gather] for name, rows in fields.items()}
        elif self.gather is not None:
            fields = {name: rows.index_select(0, self.gather) for name, rows in fields.items()}
        return Rows(fields=fields, positions=self.positions, keep=self.keep)


class ContiguousStep(RowsStep["ContiguousRows", Selection]):
    """The requests of one step; `view` gives a layer its rows."""

    def __init__(self, owner: ContiguousRows, places: Sequence[int], batch: RaggedBatch) -> None:
        super().__init__(owner, places, batch)
        self._targets: tuple[Tensor, Tensor] | None = None
        self._in_place: dict[tuple[int | None, int], tuple[Tensor, Tensor, tuple[int, ...]]] = {}

    def view(self, layer: str, state: str) -> ContiguousView:
        """What one layer sees of one of its states."""
        return ContiguousView(self, layer, state, self.owner.memory[layer, state])

    def write(self, memory: Tensor, rows: Tensor) -> None:
        """Put the new rows [tokens, ...] of the batch at their places and positions in `memory`."""
        rows = rows.detach().to(memory.dtype)
        if len(self.places) == 1 and not self.batch.paths:
            start = self.batch.contexts[0]
            memory[self.places[0], start : start + self.tokens] = rows
            return
        if self._targets is None:
            places = torch.tensor(self.places, device=self.owner.device)
            self._targets = places[self.batch.request_of.to(self.owner.device)], self._written()
        memory[self._targets] = rows

    def in_place(self, window: int | None, memory: Fields) -> RowsInPlace | None:
        """Where these fields of all requests of the batch lie, found once for all layers of a window; None where the
        places of two fields hold different numbers of rows."""
        apart = {rows.stride(0) // rows.stride(1) for rows in memory.values()}
        if len(apart) > 1:
            return None
        key = window, apart.pop()
        if key not in self._in_place:
            self._in_place[key] = self._numbers(*key)
        return RowsInPlace({name: _rows_of(rows) for name, rows in memory.items()}, *self._in_place[key])

    def _numbers(self, window: int | None, apart: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Rows of the new tokens, all that requests see, and where these begin; places lie `apart` rows apart."""
        batch = self.batch
        starts = torch.tensor(self.places, device=self.owner.device) * apart
        firsts = tuple(first_visible(context, window) for context in batch.contexts)
        ends = [context + length for context, length in zip(batch.contexts, batch.lengths, strict=True)]
        longest = max(end - first for first, end in zip(firsts, ends, strict=True))
        bounds = torch.tensor([firsts, ends], device=self.owner.device)
        positions = bounds[0, :, None] + torch.arange(longest, device=self.owner.device)
        seen = positions.minimum(bounds[1, :, None] - 1)
        numbers = starts[:, None] + located(batch, range(batch.requests), seen, firsts)
        return starts[batch.request_of] + self._written(), numbers, firsts

    def _written(self) -> Tensor:
        """Where in its place each new row lies [tokens]."""
        if not self.batch.paths:
            return self.batch.positions
        lie = [place for request in range(self.batch.requests) for place in self.batch.places(request)]
        return torch.tensor(lie, device=self.owner.device)

    def _select(self, window: int | None, requests: tuple[int, ...]) -> Selection:
        firsts = [first_visible(self.batch.contexts[r], window) for r in requests]
        ends = [self.batch.contexts[r] + self.batch.lengths[r] for r in requests]
        first, end = min(firsts), max(ends)
        positions = torch.arange(first, end, device=self.owner.device).expand(len(requests), -1)
        keep = None
        if min(ends) < end or max(firsts) > first:
            bounds = torch.tensor([firsts, ends], device=self.owner.device)
            keep = (positions >= bounds[0, :, None]) & (positions < bounds[1, :, None])
        places = [self.places[r] for r in requests]
        if any(self.batch.path(r) for r in requests):
            lie = located(self.batch, requests, positions, [first] * len(requests))
            at = torch.tensor(places, device=self.owner.device)[:, None]
            return Selection(positions, keep, self._memory_of(window, slice(None), slice(None)), (at, lie))
        if places == list(range(places[0], places[0] + len(places))):
            memory, gather = self._memory_of(window, slice(places[0], places[-1] + 1), slice(first, end)), None
        else:
            memory = self._memory_of(window, slice(None), slice(first, end))
            gather = torch.tensor(places, device=self.owner.device)
        return Selection(positions, keep, memory, gather)

    def _memory_of(self, window: int | None, places: slice, positions: slice) -> Mapping[tuple[str, str], Fields]:
        found: dict[Key, Tensor] = {}
        for bank in self.owner.banks:
            if self.owner.windows[bank.keys[0][:2]] == window:
                found |= zip(bank.keys, bank.rows[:, places, positions].unbind(0), strict=True)
        return by_state(found)


class ContiguousView:
    """What one layer sees of one state; implements `attn_core.batch.PagedView`.

    `rows` shows the store's own memory: it is valid until the step ends and must not be written to.
    """

    def __init__(self, step: ContiguousStep, layer: str, state: str, memory: Mapping[str, Tensor]) -> None:
        self._step = step
        self._key = (layer, state)
        self._memory = memory

    def append(self, fields: Fields) -> Fields:
        """Remember this step's rows, [tokens, ...] each; raises `InvalidValue` for other fields or shapes."""
        check_names(".".join(self._key), fields, self._memory)
        for name, memory in self._memory.items():
            check_shape(".".join((*self._key, name)), fields[name], (self._step.tokens, *memory.shape[2:]))
            self._step.write(memory, fields[name])
        return fields

    def rows(self, requests: Sequence[int]) -> Rows:
        """All rows these requests of the batch can see, [requests, longest, ...] each; where lengths differ, `keep`
        says which are real and the others are zero or hidden by the window."""
        return self._step.select(self._step.owner.windows[self._key], requests).rows(self._key)

    def in_place(self) -> RowsInPlace | None:
        """Where the rows of all requests of the batch lie."""
        return self._step.in_place(self._step.owner.windows[self._key], self._memory)


def _rows_of(memory: Tensor) -> Tensor:
    """Memory [requests, positions, ...] as [rows, ...]: position p of request r is row r * apart + p.

    Heads lie `positions` rows apart in a place, so that a row reaches over those of its place.
    """
    places, positions = memory.shape[:2]
    apart = memory.stride(0) // memory.stride(1)
    shape = ((places - 1) * apart + positions, *memory.shape[2:])
    return memory.as_strided(shape, memory.stride()[1:])
