"""The inputs of decode steps over a store, in memory of fixed addresses, for CUDA graphs.

Everything that changes from one step to the next (tokens, positions, slots of new rows, block tables, and the indices
of fixed-size states) is in one buffer on the device, which one copy fills. Layers get views of that buffer, the same in
every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from attn_core.batch import ModelState, Rows, StaticBatch, StaticRows
from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import always_as_many, gathers
from torch import Tensor

from attn_cache.memory import StateKey
from attn_cache.paged import PagedKVCache
from attn_cache.slots import SlotStates
from attn_cache.static_inputs import RowTable, StaticPagedView, StepBuffer, blocks_of, scrap_table

TOKENS, POSITIONS, CONTEXTS, INDICES, SLOTS = range(5)
"""Lines of the buffer; from `SLOTS` on one per window. Where there is no request, the context is -1 and the index that
of the scrap slot of fixed-size states."""


class StaticSize(NamedTuple):
    """The limits of a step: its number of requests, and the tokens of each request (`longest`)."""

    requests: int
    longest: int


class BlocksAndSlots:
    """Implements `attn_core.stores.StaticDecode` over the rows of a `PagedKVCache` and fixed-size states.

    `index` returns the index of a request in both.
    """

    def __init__(self, cache: PagedKVCache, slots: SlotStates, index: Callable[[int], int], size: StaticSize) -> None:
        self._cache = cache
        self._slots = slots
        self._index = index
        self._longest = size.longest
        width = blocks_of(size.longest, cache.block_size)
        lines = [size.requests] * (SLOTS + len(cache.pools))
        self._buffer = StepBuffer(lines, (len(cache.pools), size.requests, width), cache.device)
        self._padding = scrap_table(cache)
        self._rows = {window: [RowTable() for _ in range(size.requests)] for window in cache.pools}
        places = torch.arange(size.requests, device=cache.device)
        self._request_of, self._offset_of = places, torch.zeros_like(places)

    def load(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        names: Sequence[int],
        requests: int,
        last: Tensor | None = None,
    ) -> None:
        """See `StaticDecode.load`."""
        num_requests, padding = len(names), [0] * (requests - len(names))
        indices = [self._index(name) for name in names]
        for index, position in zip(indices, positions, strict=True):
            self._cache.begin_decode(index, position)
        lines = self._buffer.lines
        lines[TOKENS][:requests] = [*tokens, *padding]
        lines[POSITIONS][:requests] = position_array = np.array([*positions, *padding], dtype=np.int64)
        lines[CONTEXTS][:num_requests] = positions
        lines[CONTEXTS][num_requests:requests] = -1
        lines[INDICES][:requests] = [*indices, *[self._slots.scrap] * len(padding)]
        changed, size = False, self._cache.block_size
        for number, (window, pool) in enumerate(self._cache.pools.items()):
            tables = [pool.tables[index] for index in indices] + [self._padding] * (requests - num_requests)
            row_tables, table_rows = self._rows[window], self._buffer.tables[number]
            for row, table in enumerate(tables):
                changed |= row_tables[row].follow(table, table_rows[row])
            blocks = table_rows[np.arange(requests), position_array // size].astype(np.int64)
            lines[SLOTS + number][:requests] = blocks * size + position_array % size
        self._buffer.send(whole=changed)
        if last is not None and num_requests:
            step_tokens = self.tokens(num_requests)
            step_tokens.copy_(last.index_select(0, step_tokens).clamp_(min=0))

    def tokens(self, requests: int) -> Tensor:
        """See `StaticDecode.tokens`."""
        return self._buffer.line(TOKENS)[:requests]

    def batch(self, requests: int) -> StaticBatch:
        """See `StaticDecode.batch`."""
        positions = self._buffer.line(POSITIONS)[:requests]
        return StaticBatch(positions, self._request_of[:requests], self._offset_of[:requests], self._longest)

    def view(self, requests: int) -> ModelState:
        """See `StaticDecode.view`."""
        views: dict[str, dict[str, object]] = {}
        for layer, state in self._cache.windows:
            views.setdefault(layer, {})[state] = self._view((layer, state), requests)
        for (layer, state), view in self._slots.views_at(self._buffer.line(INDICES)[:requests]).items():
            views.setdefault(layer, {})[state] = view
        return views

    def _view(self, key: StateKey, requests: int) -> StaticPagedView:
        window = self._cache.windows[key]
        number = list(self._cache.pools).index(window)
        rows = StaticRows(
            self._cache.memory[key],
            self._buffer.line(SLOTS + number)[:requests],
            self._buffer.table(number)[:requests],
            (),
            block_size=self._cache.block_size,
            contexts=self._buffer.line(CONTEXTS)[:requests],
        )
        if always_as_many(window):
            return StaticWindowView(".".join(key), rows, window or 0)
        return StaticPagedView(".".join(key), rows)


class StaticWindowView(StaticPagedView):
    """The view of a state with a narrow window: the same number of rows is gathered for every request."""

    def __init__(self, name: str, rows: StaticRows, window: int) -> None:
        super().__init__(name, rows)
        self._window = window

    def rows(self, requests: Sequence[int]) -> Rows:
        """The rows of the window [requests, window, ...]; raises `NotGraphSafe` unless `requests` are all in order,
        because the host would have to select them.

        Rows before the start of a sequence are padding, and read row 0 of the memory, which is never written.
        """
        found = self._rows
        if list(requests) != list(range(len(found.contexts))):
            raise NotGraphSafe(gathers(f"{self._name}: the rows of some requests"))
        back = torch.arange(1 - self._window, 1, device=found.contexts.device)
        positions = found.contexts[:, None] + back
        real = (positions >= 0) & (found.contexts >= 0)[:, None]
        places = positions.clamp(min=0)
        blocks = found.kv_indices.gather(1, places // found.block_size).long()
        slots = torch.where(real, blocks * found.block_size + places % found.block_size, 0)
        fields = {
            name: rows.index_select(0, slots.flatten()).view(*slots.shape, *rows.shape[1:])
            for name, rows in found.fields.items()
        }
        return Rows(fields, places, real)
