"""Decode steps over a store with addresses in memory that stays where it is, for CUDA graphs.

All that changes from one step to the next - tokens, positions, where new rows go, block tables, whose state of fixed
size is whose - lies in one buffer on the device, which one copy fills. What a layer sees of it are views of that
buffer, the same in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from attn_core import Fields
from attn_core.batch import ModelState, Rows, StaticBatch, StaticRows
from attn_core.errors import NotGraphSafe, WrongState
from attn_core.graph_safety import always_as_many, gathers
from torch import Tensor

from attn_cache.block_table import BlockTable
from attn_cache.kv_cache import Window
from attn_cache.memory import StateKey, check_names, check_shape
from attn_cache.paged import PagedKVCache
from attn_cache.slots import SlotStates

TOKENS, POSITIONS, CONTEXTS, INDICES, SLOTS = range(5)
"""Lines of the buffer; from `SLOTS` on one for each window. A context is -1 where there is no request, whose index is
that of the scrap place of states of fixed size."""


class StaticSize(NamedTuple):
    """At most so many requests in a step, of at most `longest` tokens each."""

    requests: int
    longest: int


class BlocksAndSlots:
    """Implements `attn_core.stores.StaticDecode` over the rows of a `PagedKVCache` and states of fixed size.

    `index` gives the index of a request in both.
    """

    def __init__(self, cache: PagedKVCache, slots: SlotStates, index: Callable[[int], int], size: StaticSize) -> None:
        self._cache = cache
        self._slots = slots
        self._index = index
        self._longest = size.longest
        self._buffer = StepBuffer(size.requests, list(cache.pools), self._width(size.longest), cache.device)
        scratch = BlockTable(cache.block_size, 0, [1 + cache.num_blocks])
        self._padding = scratch
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
        given, missing = len(names), [0] * (requests - len(names))
        indices = [self._index(name) for name in names]
        for index, position in zip(indices, positions, strict=True):
            self._cache.begin_decode(index, position)
        lines = self._buffer.lines
        lines[TOKENS, :requests] = [*tokens, *missing]
        lines[POSITIONS, :requests] = at = np.array([*positions, *missing], dtype=np.int64)
        lines[CONTEXTS, :given] = positions
        lines[CONTEXTS, given:requests] = -1
        lines[INDICES, :requests] = [*indices, *[self._slots.scrap] * len(missing)]
        changed, size = False, self._cache.block_size
        for number, (window, pool) in enumerate(self._cache.pools.items()):
            tables = [pool.tables[index] for index in indices] + [self._padding] * (requests - given)
            known, lists = self._rows[window], self._buffer.tables[number]
            for row, table in enumerate(tables):
                changed |= known[row].follow(table, lists[row])
            blocks = lists[np.arange(requests), at // size].astype(np.int64)
            lines[SLOTS + number, :requests] = blocks * size + at % size
        self._buffer.send(whole=changed)
        if last is not None and given:
            here = self.tokens(given)
            here.copy_(last.index_select(0, here).clamp_(min=0))

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

    def _width(self, longest: int) -> int:
        """Blocks of a request, an even number so that tables fill whole int64."""
        blocks = -(-longest // self._cache.block_size) + 1
        return blocks + blocks % 2


class RowTable:
    """What a row of a block table on the device holds: so many blocks of a table, as it was after so many edits."""

    def __init__(self) -> None:
        self._table: BlockTable | None = None
        self._edits = 0
        self._count = 0

    def follow(self, table: BlockTable, row: np.ndarray) -> bool:
        """Bring a row [blocks] up to date; whether anything changed."""
        same = self._table is table and self._edits == table.edits
        count = table.first + len(table.blocks)
        if same and count == self._count:
            return False
        start = self._count if same else table.first
        if count > len(row):
            raise WrongState(f"a request holds {count} blocks; a static step has room for {len(row)}")
        row[start:count] = table.blocks[start - table.first :]
        self._table, self._edits, self._count = table, table.edits, count
        return True


class StepBuffer:
    """Lines [lines, requests], int64, and block tables [windows, requests, width], int32, in one piece of memory.

    They are written in `lines` and `tables` on the host; `send` copies them to the device.
    """

    def __init__(self, requests: int, windows: Sequence[Window], width: int, device: torch.device) -> None:
        self._count = SLOTS + len(windows)
        self._requests = requests
        self._head = self._count * requests
        total = self._head + len(windows) * requests * width // 2
        self._shape = len(windows), requests, width
        self._written = np.zeros(total, dtype=np.int64)
        self.lines = self._written[: self._head].reshape(self._count, requests)
        self.tables = self._written[self._head :].view(np.int32).reshape(self._shape)
        pinned = device.type == "cuda"
        # Two, as a copy may still read one of them while the next step is written.
        self._sent = [torch.zeros(total, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._there = torch.zeros(total, dtype=torch.int64, device=device)
        self._tables = self._there[self._head :].view(torch.int32).view(self._shape)

    def line(self, number: int) -> Tensor:
        """A line [requests] on the device."""
        return self._there[number * self._requests : (number + 1) * self._requests]

    def table(self, number: int) -> Tensor:
        """The block tables [requests, width] of a window on the device."""
        return self._tables[number]

    def send(self, *, whole: bool) -> None:
        """Copy what was written to the device, the block tables too if `whole`."""
        size = len(self._written) if whole else self._head
        self._sent.reverse()
        source = self._sent[0][:size]
        source.numpy()[:] = self._written[:size]
        self._there[:size].copy_(source, non_blocking=True)


class StaticPagedView:
    """The view of one state of one layer in a static step."""

    def __init__(self, name: str, rows: StaticRows) -> None:
        self._name = name
        self._rows = rows

    def append(self, fields: Fields) -> Fields:
        """Write this step's rows, [requests, ...] each; raises `InvalidValue` for other fields or shapes."""
        memory: Mapping[str, Tensor] = self._rows.fields
        check_names(self._name, fields, memory)
        for name, kept in memory.items():
            rows = fields[name]
            check_shape(f"{self._name}.{name}", rows, (len(self._rows.slot_mapping), *kept.shape[1:]))
            kept.index_copy_(0, self._rows.slot_mapping, rows.detach().to(kept.dtype))
        return fields

    def rows(self, requests: Sequence[int]) -> Rows:
        """Always raises `NotGraphSafe`: how many rows there are to gather is known on the device alone."""
        raise NotGraphSafe(gathers(f"{self._name}: the rows of {len(requests)} requests"))

    def in_place(self) -> StaticRows:
        """Where the rows of all requests lie."""
        return self._rows


class StaticWindowView(StaticPagedView):
    """The view of a state of which a narrow window is remembered: as many rows are gathered for every request."""

    def __init__(self, name: str, rows: StaticRows, window: int) -> None:
        super().__init__(name, rows)
        self._window = window

    def rows(self, requests: Sequence[int]) -> Rows:
        """The rows of the window [requests, window, ...]; raises `NotGraphSafe` for other requests than all in order,
        which the host would have to name.

        Those before the start of a sequence are padding, and read row 0 of the memory, which is never written.
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
