"""A paged KV cache: requests allocate fixed-size blocks as they grow; one block number serves all layers of a window.

Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv 2309.06180.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from attn_core import Field, Fields, RaggedBatch
from attn_core.batch import Rows, RowsInPlace
from attn_core.errors import WrongState
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor

from attn_cache.block_table import BLOCK_SIZE, BlockPool, BlockTable
from attn_cache.kv_cache import (
    MANY_TOKENS,
    CachedStep,
    Extent,
    KVCacheStep,
    Window,
    extents_of,
    fields_of,
    first_visible,
    slots_at,
)
from attn_cache.memory import (
    FieldKey,
    FieldStack,
    allocate_stacks,
    by_state,
    check_names,
    check_shape,
    field_tensors,
    lazy_zeros,
)


class PagedKVCache:
    """Implements `attn_cache.kv_cache.KVCache`.

    States of one sliding window share block tables; a block wholly before the window is freed. Each window has a pool
    of enough blocks for all `size.tokens`. The tokens of a block are a multiple of those of any row, so that a state
    with a row per several tokens has the same blocks as the others, with fewer rows in them. Freed blocks are not
    cleared: a read never reaches beyond the rows that its own request has written.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, block_size: int = BLOCK_SIZE) -> None:
        self.extents = extents_of(specs)
        self.block_size = block_size = math.lcm(block_size, *(extent.every for extent in self.extents.values()))
        self.num_blocks = -(-size.tokens // block_size)
        self.device = torch.device(size.device)
        windows = {extent.window for extent in self.extents.values()}
        self.pools = {window: BlockPool(window, self.num_blocks, block_size) for window in windows}
        self.stacks: dict[Extent, list[FieldStack]] = {
            extent: allocate_stacks(fields_of(specs, extent), size.dtype, partial(self._allocate, extent))
            for extent in set(self.extents.values())
        }
        self.memory = by_state(field_tensors([stack for stacks in self.stacks.values() for stack in stacks]))
        self._computed: list[int] = []
        self._full_attention = self.pools[None] if set(self.pools) == {None} else None

    @property
    def used_tokens(self) -> int:
        """Token capacity of the blocks that requests reference, in the window that has most of them."""
        return self.block_size * max((pool.used_blocks for pool in self.pools.values()), default=0)

    @property
    def total_tokens(self) -> int:
        """Token capacity of all blocks of a window."""
        return self.block_size * self.num_blocks

    def fits(self, tokens: int) -> bool:
        """See `KVCache.fits`."""
        return not self.pools or tokens <= self.total_tokens

    def holds(self, requests: int, tokens: int) -> bool:
        """See `KVCache.holds`; no block is assumed to be shared."""
        return not self.pools or requests * -(-tokens // self.block_size) <= self.num_blocks

    def add_request(self) -> None:
        """See `KVCache.add_request`."""
        self._computed.append(0)
        for pool in self.pools.values():
            pool.add_request()

    def reserve(self, index: int, tokens: int) -> bool:
        """Allocate the missing blocks of every window, or none; blocks before a window are freed first."""
        # Fast path: nothing to allocate, and no window whose blocks could be freed.
        if self._full_attention is not None and tokens <= self._full_attention.tables[index].end:
            return True
        needs = [
            (pool, pool.missing(index, tokens), first_visible(self._computed[index], pool.window))
            for pool in self.pools.values()
        ]
        if not all(pool.can_allocate(blocks - pool.would_free(index, first)) for pool, blocks, first in needs):
            return False
        for pool, blocks, first in needs:
            pool.free_before(index, first)
            pool.allocate(index, blocks)
        return True

    def would_fit(self, index: int, tokens: int) -> bool:
        """Whether `reserve` would succeed once every cached block was evicted."""
        context = self._computed[index]
        return all(
            pool.can_allocate(
                pool.missing(index, tokens)
                - pool.cached_blocks
                - len(pool.exclusive_before(index, first_visible(context, pool.window)))
            )
            for pool in self.pools.values()
        )

    def would_fork(self, tokens: int) -> bool:
        """Whether `fork` would succeed once every cached block was evicted."""
        return tokens % self.block_size == 0 or all(
            pool.can_allocate(1 - pool.cached_blocks) for pool in self.pools.values()
        )

    def fork(self, index: int, tokens: int) -> bool:
        """See `KVCache.fork`; full blocks are shared, a partly filled last block is copied."""
        if tokens % self.block_size and not all(pool.can_allocate(1) for pool in self.pools.values()):
            return False
        self._computed.append(tokens)
        for window, pool in self.pools.items():
            copied = pool.fork(index, tokens)
            if copied is not None:
                self._copy_block(window, *copied)
        return True

    def rewind(self, index: int, tokens: int) -> None:
        """See `KVCache.rewind`; the blocks stay allocated."""
        self._computed[index] = tokens

    def tree_unsupported_reason(self) -> str | None:
        """None, as rows can be read from any slot, except where a row has several tokens."""
        return MANY_TOKENS if any(extent.every > 1 for extent in self.extents.values()) else None

    def move(self, index: int, slots: Sequence[int], start: int) -> None:
        """See `KVCache.move`."""
        for window, pool in self.pools.items():
            table = pool.tables[index]
            source = torch.tensor([table.slot(slot) for slot in slots], device=self.device)
            target = torch.tensor([table.slot(start + n) for n in range(len(slots))], device=self.device)
            for stack in self.stacks[Extent(window)]:
                stack.rows[:, target] = stack.rows[:, source]

    def pin(self, index: int, number: int) -> dict[Window, int]:
        """Pin block number `number` of the request in every window that still has it; these blocks by window."""
        pinned = {}
        for window, pool in self.pools.items():
            table = pool.tables[index]
            if 0 <= number - table.first < len(table.blocks):
                pinned[window] = table.blocks[number - table.first]
                pool.pin(pinned[window])
        return pinned

    def unpin(self, blocks: Mapping[Window, int]) -> None:
        """Unpin these blocks, given by window."""
        for window, block in blocks.items():
            self.pools[window].unpin(block)

    def share(self, index: int, tokens: int, blocks: Sequence[Mapping[Window, int]]) -> None:
        """Let the empty request at `index` reference the pinned blocks of its first `tokens` positions.

        `blocks[i]` are block number i of every window; those before a window are left out.
        """
        for window, pool in self.pools.items():
            first = first_visible(tokens, window) // self.block_size
            pool.share(index, first, [block[window] for block in blocks[first:]])
        self._computed[index] = tokens

    def remove_request(self, index: int) -> None:
        """See `KVCache.remove_request`."""
        for pool in self.pools.values():
            pool.remove_request(index)
        last = self._computed.pop()
        if index < len(self._computed):
            self._computed[index] = last

    def step(self, indices: Sequence[int], batch: RaggedBatch) -> KVCacheStep:
        """See `KVCache.step`; raises `WrongState` if rows of the step are not reserved."""
        self._begin(indices, batch)
        return PagedStep(self, indices, batch)

    def begin(self, index: int, start: int, end: int) -> None:
        """Mark the rows at positions `start` to `end`, exclusive, as computed; raises `WrongState` if one is not
        reserved."""
        for pool in self.pools.values():
            self._require_reserved(pool, index, (first_visible(start, pool.window), end))
        self._computed[index] = end

    def export_rows(self, index: int, tokens: int) -> dict[FieldKey, Tensor]:
        """See `KVCache.export_rows`."""
        if tokens > self._computed[index] and self.pools:
            raise WrongState(f"the rows of {tokens} tokens are needed, {self._computed[index]} are computed")
        slots = {extent: self._visible_slots(extent, index, tokens) for extent in self.stacks}
        return {
            (*state, name): rows.index_select(0, slots[self.extents[state]])
            for state, fields in self.memory.items()
            for name, rows in fields.items()
        }

    def start_at(self, index: int, tokens: int) -> None:
        """See `KVCache.start_at`; no blocks are needed before a window."""
        self._computed[index] = tokens
        for window, pool in self.pools.items():
            pool.share(index, first_visible(tokens, window) // self.block_size, [])

    def import_rows(self, index: int, tokens: int, rows: Mapping[FieldKey, Tensor]) -> None:
        """See `KVCache.import_rows`."""
        slots = {extent: self._visible_slots(extent, index, tokens) for extent in self.stacks}
        for (layer, state, name), given in rows.items():
            self.memory[layer, state][name].index_copy_(0, slots[self.extents[layer, state]], given.to(self.device))

    def live_bytes(self, index: int, tokens: int) -> int:
        """Bytes of the last `window` of `tokens` rows of every field, as far as blocks store them."""
        total = 0
        for state, fields in self.memory.items():
            window, every = self.extents[state]
            table = self.pools[window].tables[index]
            first = 0 if window is None else max(0, tokens - window)
            stored = max(0, min(tokens, table.end) - max(first, table.first * self.block_size))
            total += sum(stored // every * rows[0].nbytes for rows in fields.values())
        return total

    def _visible_slots(self, extent: Extent, index: int, tokens: int) -> Tensor:
        table, first = self.pools[extent.window].tables[index], extent.first(tokens)
        if first < table.first * self.block_size or tokens > table.end:
            stored = f"{table.first * self.block_size} to {table.end - 1}"
            raise WrongState(f"positions {first} to {tokens - 1} are needed, {stored} are stored")
        positions = torch.arange(first, extent.rows(tokens), device=self.device) * extent.every
        blocks = torch.tensor(table.blocks, dtype=torch.int64, device=self.device)
        slots = blocks[positions // self.block_size - table.first] * self.block_size + positions % self.block_size
        return slots // extent.every

    def _copy_block(self, window: Window, source: int, copy: int) -> None:
        for extent, stacks in self.stacks.items():
            size = self.block_size // extent.every
            for stack in stacks if extent.window == window else ():
                stack.rows[:, self._rows_of(copy, size)] = stack.rows[:, self._rows_of(source, size)]

    def _rows_of(self, block: int, size: int) -> slice:
        return slice(block * size, (block + 1) * size)

    def _begin(self, indices: Sequence[int], batch: RaggedBatch) -> None:
        for request, index in enumerate(indices):
            end = batch.end(request)
            for pool in self.pools.values():
                self._require_reserved(pool, index, (first_visible(batch.contexts[request], pool.window), end))
            self._computed[index] = end

    def _require_reserved(self, pool: BlockPool, index: int, needed: tuple[int, int]) -> None:
        table, (first, end) = pool.tables[index], needed
        if end > table.end or first < table.first * self.block_size:
            reserved = f"{table.first * self.block_size} to {table.end - 1}"
            raise WrongState(f"positions {first} to {end - 1} are needed, {reserved} are reserved")

    def _allocate(self, extent: Extent, count: int, field: Field, dtype: torch.dtype) -> Tensor:
        # Padding of a static step writes to the last block.
        rows = (2 + self.num_blocks) * (self.block_size // extent.every)
        return lazy_zeros((count, rows, *field.shape), dtype, self.device)


@dataclass(frozen=True, eq=False)
class PagedRows:
    """The rows that some requests attend to in states of one extent.

    `positions` and `slots` are [requests, longest], int64; `slots` are rows of the pool, padded with row 0.
    `key_padding_mask` [requests, longest], bool, is True for real rows, None if all are real. `consecutive` replaces
    `slots` where the rows of a single request are adjacent in the pool, so that they are read without a gather.
    """

    positions: Tensor
    key_padding_mask: Tensor | None
    slots: Tensor
    consecutive: slice | None

    def rows(self, memory: Mapping[str, Tensor]) -> Rows:
        """These rows of the fields of one state."""
        return Rows(
            fields={name: self._read(rows) for name, rows in memory.items()},
            positions=self.positions,
            key_padding_mask=self.key_padding_mask,
        )

    def _read(self, rows: Tensor) -> Tensor:
        if self.consecutive is not None:
            return rows[None, self.consecutive]
        return rows.index_select(0, self.slots.flatten()).view(*self.slots.shape, *rows.shape[1:])


class PagedStep(CachedStep[PagedKVCache, PagedRows]):
    """One engine step; slot mappings are computed once for all layers of an extent."""

    def __init__(self, cache: PagedKVCache, indices: Sequence[int], batch: RaggedBatch) -> None:
        super().__init__(cache, indices, batch)
        self._slot_mappings: dict[Extent, Tensor] = {}
        self._in_place: dict[Extent, tuple[Tensor, Tensor, tuple[int, ...]]] = {}

    def view(self, layer: str, state: str) -> PagedStateView:
        """The view of one state of one layer."""
        return PagedStateView(self, layer, state)

    def slot_mapping(self, extent: Extent) -> Tensor:
        """The rows of the pool [rows], int64, to which the new rows of the batch are written."""
        found = self._slot_mappings.get(extent)
        if found is None:
            pool, every = self.cache.pools[extent.window], extent.every
            slots: list[int] = []
            for index, places in zip(self.indices, self.new_rows(extent), strict=True):
                table = pool.tables[index]
                slots += [table.slot(place * every) // every for place in places]
            found = self._slot_mappings[extent] = torch.tensor(slots, dtype=torch.int64, device=self.cache.device)
        return found

    def in_place(self, extent: Extent, memory: Fields) -> RowsInPlace:
        """Addresses of the rows of all requests of the batch; computed once for all layers of an extent."""
        if extent not in self._in_place:
            found = self.select(extent, range(self.batch.requests))
            slots = found.slots
            if found.consecutive is not None:
                slots = torch.arange(found.consecutive.start, found.consecutive.stop, device=self.cache.device)[None]
            firsts = tuple(map(extent.first, self.batch.contexts))
            self._in_place[extent] = self.slot_mapping(extent), slots, firsts
        return RowsInPlace(memory, *self._in_place[extent])

    def _select(self, extent: Extent, requests: tuple[int, ...]) -> PagedRows:
        pool, every = self.cache.pools[extent.window], extent.every
        firsts, ends = self.bounds(extent, requests)
        longest = max(end - first for first, end in zip(firsts, ends, strict=True))
        bounds = torch.tensor([firsts, ends], device=self.cache.device)
        positions = bounds[0, :, None] + torch.arange(longest, device=self.cache.device)
        real, positions = positions < bounds[1, :, None], positions * every
        tables = [pool.tables[self.indices[r]] for r in requests]
        if len(requests) == 1 and not self.batch.path(requests[0]):
            start = _consecutive_start(tables[0], firsts[0] - tables[0].first * pool.block_size, longest * every)
            if start is not None:
                at = start // every
                return PagedRows(positions + every - 1, None, positions, slice(at, at + longest))
        widest = max(len(table.blocks) for table in tables)
        block_table = torch.tensor(
            [table.blocks + [0] * (widest - len(table.blocks)) for table in tables], device=self.cache.device
        )
        first_blocks = torch.tensor([table.first for table in tables], device=self.cache.device)
        # Padding positions may lie beyond a request's table; they read row 0, whichever block is looked up.
        offsets = slots_at(self.batch, requests, positions, firsts)
        number = (offsets // pool.block_size - first_blocks[:, None]).clamp_(max=widest - 1)
        slots = (block_table.gather(1, number) * pool.block_size + offsets % pool.block_size).where(real, 0) // every
        return PagedRows(positions + every - 1, None if bool(real.all()) else real, slots, None)


def _consecutive_start(table: BlockTable, offset: int, rows: int) -> int | None:
    """The pool row of the first of `rows` rows from `offset` on, if they are adjacent in the pool; else None."""
    blocks, size = table.blocks, table.block_size
    if rows == 0:
        return 0
    first, last = offset // size, (offset + rows - 1) // size
    if blocks[last] - blocks[first] != last - first or blocks[first : last + 1] != list(
        range(blocks[first], blocks[last] + 1)
    ):
        return None
    return blocks[first] * size + offset % size


class PagedStateView:
    """The view of one state of one layer in a step; implements `attn_core.batch.PagedView`."""

    def __init__(self, step: PagedStep, layer: str, state: str) -> None:
        self._step = step
        self._key = (layer, state)
        self._extent = step.cache.extents[self._key]
        self._memory = step.cache.memory[self._key]

    def append(self, fields: Fields) -> Fields:
        """Write this step's rows, [tokens, ...] each; raises `InvalidValue` for other fields or shapes."""
        check_names(".".join(self._key), fields, self._memory)
        slot_mapping = self._step.slot_mapping(self._extent)
        for name, memory in self._memory.items():
            rows = fields[name]
            check_shape(".".join((*self._key, name)), rows, (len(slot_mapping), *memory.shape[1:]))
            memory.index_copy_(0, slot_mapping, rows.detach().to(memory.dtype))
        return fields

    def rows(self, requests: Sequence[int]) -> Rows:
        """All rows these requests attend to, [requests, longest, ...] each, padded with zeros."""
        return self._step.select(self._extent, requests).rows(self._memory)

    def in_place(self) -> RowsInPlace:
        """Addresses of the rows of all requests of the batch in the cache's memory."""
        return self._step.in_place(self._extent, self._memory)
