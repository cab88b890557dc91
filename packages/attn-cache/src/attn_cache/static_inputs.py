"""The inputs of steps in one buffer on the device, which one copy fills, for steps recorded once and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from attn_core import Fields
from attn_core.batch import Rows, StaticMixedRows, StaticRows
from attn_core.errors import NotGraphSafe, WrongState
from attn_core.graph_safety import gathers
from torch import Tensor

from attn_cache.block_table import BlockTable
from attn_cache.memory import check_names, check_shape
from attn_cache.paged import PagedKVCache


def blocks_of(longest: int, block_size: int) -> int:
    """The number of blocks for `longest` tokens, with one to spare, and even so that tables consist of whole int64."""
    blocks = -(-longest // block_size) + 1
    return blocks + blocks % 2


def scrap_table(cache: PagedKVCache) -> BlockTable:
    """The block table that padding uses: the block of the cache that belongs to no request."""
    return BlockTable(cache.block_size, 0, [1 + cache.num_blocks])


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

    def __init__(self, name: str, rows: StaticRows | StaticMixedRows) -> None:
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

    def in_place(self) -> StaticRows | StaticMixedRows:
        """The stored rows of all requests of the batch."""
        return self._rows
