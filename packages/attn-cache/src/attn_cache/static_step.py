"""The inputs of steps over a store, in memory of fixed addresses, for CUDA graphs.

Everything that changes from one step to the next (tokens, positions, slots of new rows, block tables, and the indices
of fixed-size states) is in one buffer on the device, which one copy fills. Layers get views of that buffer, the same in
every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from attn_core import Fields
from attn_core.batch import ModelState, Rows, StaticBatch, StaticRows
from attn_core.errors import NotGraphSafe, WrongState
from attn_core.graph_safety import always_as_many, gathers, state_reason
from attn_core.stores import ModelSpecs
from torch import Tensor

from attn_cache.block_table import BlockTable
from attn_cache.memory import StateKey, check_names, check_shape
from attn_cache.paged import PagedKVCache
from attn_cache.slots import SlotStates

STARTS, CONTEXTS, INDICES, TOKENS, POSITIONS, SLOTS = range(6)
"""Lines of the buffer: the first three have entries per request, the others per token; from `SLOTS` on one per window.
Where there is no request, the context is -1 and the index that of the scrap slot of fixed-size states."""


class StepLimits(NamedTuple):
    """The limits of a step: its number of tokens, of requests, and the tokens of each request (`longest`)."""

    tokens: int
    requests: int
    longest: int


class StepInputs:
    """Implements `attn_core.stores.StaticStep` over the rows of a `PagedKVCache` and fixed-size states.

    `index` returns the index of a request in both; `specs` are the states of all layers.
    """

    def __init__(
        self,
        specs: ModelSpecs,
        memory: tuple[PagedKVCache, SlotStates],
        index: Callable[[int], int],
        limits: StepLimits,
    ) -> None:
        self._specs = specs
        self._cache, self._slots = cache, _ = memory
        self._index = index
        self._limits = limits
        windows = len(cache.pools)
        lines = [limits.requests + 2, limits.requests + 1, limits.requests, *[limits.tokens] * (2 + windows)]
        tables = windows, limits.requests, blocks_of(limits.longest, cache.block_size)
        self._buffer = StepBuffer(lines, tables, cache.device)
        self._rows = {window: [RowTable() for _ in range(limits.requests)] for window in cache.pools}
        self._numbers = np.arange(max(limits.tokens, limits.requests))
        self._request_of = torch.arange(limits.requests, device=cache.device)

    def load(
        self,
        tokens: Sequence[int],
        contexts: Sequence[int],
        lengths: Sequence[int],
        names: Sequence[int],
        size: int,
        last: Tensor | None = None,
    ) -> None:
        """See `StaticStep.load`."""
        indices, num_requests, num_tokens = [self._index(name) for name in names], len(names), len(tokens)
        for index, context, length in zip(indices, contexts, lengths, strict=True):
            self._cache.begin(index, context, context + length)
        lines, counts = self._buffer.lines, np.array(lengths, dtype=np.int64)
        # Entries after the last request have no tokens, except the last one, which has those of padding.
        lines[STARTS][0] = 0
        lines[STARTS][1 : num_requests + 1] = ends = counts.cumsum()
        lines[STARTS][num_requests + 1 :] = num_tokens
        lines[STARTS][self._requests(size) + 1] = size
        lines[CONTEXTS][:num_requests] = contexts
        lines[CONTEXTS][num_requests:] = -1
        lines[INDICES][:num_requests] = indices
        lines[INDICES][num_requests:] = self._slots.scrap
        lines[TOKENS][:num_tokens] = tokens
        lines[TOKENS][num_tokens:size] = 0
        request_of, positions = self._numbers[:num_requests], lines[CONTEXTS][:num_requests]
        if num_tokens > num_requests:
            request_of = request_of.repeat(counts)
            positions = (positions + counts - ends)[request_of] + self._numbers[:num_tokens]
        lines[POSITIONS][:num_tokens] = positions
        lines[POSITIONS][num_tokens:size] = 0
        self._load_tables(indices, request_of, positions, size)
        if last is not None and num_tokens:
            step_tokens = self.tokens(num_tokens)
            step_tokens.copy_(last.index_select(0, step_tokens).clamp_(min=0))

    def _load_tables(self, indices: Sequence[int], request_of: np.ndarray, positions: np.ndarray, size: int) -> None:
        """Fill the block tables of requests and the slots of their tokens, and send all inputs to the device."""
        changed, block, num_tokens = False, self._cache.block_size, len(positions)
        scrap = (1 + self._cache.num_blocks) * block  # the block that belongs to no request
        blocks, offsets = positions // block, positions % block
        for number, (window, pool) in enumerate(self._cache.pools.items()):
            table, rows, slots = self._buffer.tables[number], self._rows[window], self._buffer.lines[SLOTS + number]
            for row, index in enumerate(indices):
                changed |= rows[row].follow(pool.tables[index], table[row])
            slots[:num_tokens] = table[request_of, blocks].astype(np.int64) * block + offsets
            slots[num_tokens:size] = scrap
        self._buffer.send(whole=changed)

    def tokens(self, size: int) -> Tensor:
        """See `StaticStep.tokens`."""
        return self._buffer.line(TOKENS)[:size]

    def batch(self, size: int, max_query_len: int) -> StaticBatch:
        """See `StaticStep.batch`."""
        positions = self._buffer.line(POSITIONS)[:size]
        return StaticBatch(positions, self._limits.longest, max_query_len, self._request_of[:size])

    def view(self, size: int, max_query_len: int) -> ModelState:
        """See `StaticStep.view`."""
        check_states(self._specs, max_query_len)
        views: dict[str, dict[str, object]] = {}
        for layer, state in self._cache.extents:
            views.setdefault(layer, {})[state] = self._view((layer, state), size, max_query_len)
        for (layer, state), view in self._slots.views_at(self._buffer.line(INDICES)[:size]).items():
            views.setdefault(layer, {})[state] = view
        return views

    def _view(self, key: StateKey, size: int, max_query_len: int) -> StaticPagedView:
        window, requests = self._cache.extents[key].window, self._requests(size)
        number = list(self._cache.pools).index(window)
        rows = StaticRows(
            self._cache.memory[key],
            self._buffer.line(SLOTS + number)[:size],
            self._buffer.table(number)[:requests],
            (),
            block_size=self._cache.block_size,
            contexts=self._buffer.line(CONTEXTS)[: requests + 1],
            query_starts=self._buffer.line(STARTS)[: requests + 2],
            max_query_len=max_query_len,
        )
        if max_query_len == 1 and always_as_many(window):
            return StaticWindowView(".".join(key), rows, window or 0)
        return StaticPagedView(".".join(key), rows)

    def _requests(self, size: int) -> int:
        """The largest number of requests in a step of `size` tokens."""
        return min(size, self._limits.requests)


def check_states(specs: ModelSpecs, max_query_len: int) -> None:
    """Raise `NotGraphSafe` if steps of up to `max_query_len` tokens of a request over these states cannot be
    recorded."""
    for layer, states in specs.items():
        reason = state_reason(f"layer {layer}", states, max_query_len)
        if reason is not None:
            raise NotGraphSafe(reason)


def blocks_of(longest: int, block_size: int) -> int:
    """The number of blocks for `longest` tokens, with one to spare, and even so that tables consist of whole int64."""
    blocks = -(-longest // block_size) + 1
    return blocks + blocks % 2


class RowTable:
    """The state of a row of a block table on the device: which request's table it has, after how many edits, and how
    many of its blocks."""

    def __init__(self) -> None:
        self._table: BlockTable | None = None
        self._edits = 0
        self._count = 0

    def follow(self, table: BlockTable, row: np.ndarray) -> bool:
        """Update `row` [blocks] from `table`; returns whether anything changed."""
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
    """Lines of these lengths, int64, and block tables [windows, requests, width], int32, in one allocation.

    They are written to `lines` and `tables` on the host; `send` copies them to the device. `width` is even.
    """

    def __init__(self, lines: Sequence[int], tables: tuple[int, int, int], device: torch.device) -> None:
        ends = list(accumulate(lines, initial=0))
        self._spans = [slice(*span) for span in pairwise(ends)]
        self._line_elements = ends[-1]
        windows, requests, width = tables
        total = self._line_elements + windows * requests * width // 2
        self._host_buffer = np.zeros(total, dtype=np.int64)
        self.lines = [self._host_buffer[span] for span in self._spans]
        self.tables = self._host_buffer[self._line_elements :].view(np.int32).reshape(tables)
        pinned = device.type == "cuda"
        # Two, because a copy may still read one of them while the next step is written; the host waits before it writes
        # to one whose copy has not ended, as steps that end no prompt do not wait for the device.
        self._staging = [torch.zeros(total, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._device_buffer = torch.zeros(total, dtype=torch.int64, device=device)
        self._tables = self._device_buffer[self._line_elements :].view(torch.int32).view(tables)

    def line(self, number: int) -> Tensor:
        """A line on the device."""
        return self._device_buffer[self._spans[number]]

    def table(self, number: int) -> Tensor:
        """The block tables [requests, width] of a window on the device."""
        return self._tables[number]

    def send(self, *, whole: bool) -> None:
        """Copy the lines to the device, and with `whole` the block tables, too."""
        size = len(self._host_buffer) if whole else self._line_elements
        self._staging.reverse()
        self._copied.reverse()
        source, copied = self._staging[0][:size], self._copied[0]
        if copied is not None:
            copied.synchronize()
        source.numpy()[:] = self._host_buffer[:size]
        self._device_buffer[:size].copy_(source, non_blocking=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(self._device_buffer.device))


class StaticPagedView:
    """The view of one state of one layer in a static step."""

    def __init__(self, name: str, rows: StaticRows) -> None:
        self._name = name
        self._rows = rows

    def append(self, fields: Fields) -> Fields:
        """Write this step's rows, [tokens, ...] each; raises `InvalidValue` for other fields or shapes."""
        memory: Mapping[str, Tensor] = self._rows.fields
        check_names(self._name, fields, memory)
        for name, kept in memory.items():
            rows = fields[name]
            check_shape(f"{self._name}.{name}", rows, (len(self._rows.slot_mapping), *kept.shape[1:]))
            kept.index_copy_(0, self._rows.slot_mapping, rows.detach().to(kept.dtype))
        return fields

    def rows(self, requests: Sequence[int]) -> Rows:
        """Always raises `NotGraphSafe`: the number of rows to gather is known only on the device."""
        raise NotGraphSafe(gathers(f"{self._name}: the rows of {len(requests)} requests"))

    def in_place(self) -> StaticRows:
        """The stored rows of all requests of the batch."""
        return self._rows


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
        found, contexts = self._rows, self._rows.contexts[:-1]
        if list(requests) != list(range(len(contexts))):
            raise NotGraphSafe(gathers(f"{self._name}: the rows of some requests"))
        back = torch.arange(1 - self._window, 1, device=contexts.device)
        positions = contexts[:, None] + back
        real = (positions >= 0) & (contexts >= 0)[:, None]
        places = positions.clamp(min=0)
        blocks = found.kv_indices.gather(1, places // found.block_size).long()
        slots = torch.where(real, blocks * found.block_size + places % found.block_size, 0)
        fields = {
            name: rows.index_select(0, slots.flatten()).view(*slots.shape, *rows.shape[1:])
            for name, rows in found.fields.items()
        }
        return Rows(fields, places, real)
