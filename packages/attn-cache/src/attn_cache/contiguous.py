"""A KV cache in one tensor per field: every request owns a row of `max_seq_len` token positions, read without copying.

The memory of a field [num_heads, head_dim] is laid out [requests, num_heads, positions, head_dim] and shown as
[requests, positions, num_heads, head_dim], so that matrix products over positions read it without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from attn_core import Field, Fields, RaggedBatch
from attn_core.batch import Rows, RowsInPlace
from attn_core.errors import InvalidValue, WrongState
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor

from attn_cache.kv_cache import MANY_TOKENS, CachedStep, Extent, extents_of, fields_of, slots_at
from attn_cache.memory import (
    FieldKey,
    FieldStack,
    StateKey,
    allocate_stacks,
    by_state,
    check_names,
    check_shape,
    field_tensors,
    lazy_zeros,
)


class ContiguousKVCache:
    """Implements `attn_cache.kv_cache.KVCache`.

    A sliding window limits what is read but frees no memory (the paged cache does that). Memory that holds no row of a
    running request is zero, so padding of a batch reads as zero.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize) -> None:
        self.max_requests = size.requests
        self.capacity = size.tokens // size.requests
        if self.capacity < 1:
            raise InvalidValue.of("tokens", size.tokens, f"at least one for each of the {size.requests} requests")
        self.device = torch.device(size.device)
        self.extents = extents_of(specs)
        self.stacks: list[tuple[Extent, FieldStack]] = [
            (extent, stack)
            for extent in set(self.extents.values())
            for stack in allocate_stacks(fields_of(specs, extent), size.dtype, partial(self._allocate, extent))
        ]
        self.memory = by_state(field_tensors([stack for _, stack in self.stacks]))
        self._reserved: list[int] = []

    @property
    def used_tokens(self) -> int:
        """Tokens that are reserved."""
        return sum(self._reserved) if self.memory else 0

    @property
    def total_tokens(self) -> int:
        """The capacity of all requests together, in tokens."""
        return self.capacity * self.max_requests

    def fits(self, tokens: int) -> bool:
        """Whether the request is no longer than the capacity of one request."""
        return not self.memory or tokens <= self.capacity

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether this many requests are possible, and each has enough capacity."""
        return requests <= self.max_requests and self.fits(tokens)

    def add_request(self) -> None:
        """See `KVCache.add_request`."""
        self._reserved.append(0)

    def reserve(self, index: int, tokens: int) -> bool:
        """See `KVCache.reserve`; False beyond the capacity of one request."""
        if not self.fits(tokens):
            return False
        self._reserved[index] = max(self._reserved[index], tokens)
        return True

    def fork(self, index: int, tokens: int) -> bool:
        """See `KVCache.fork`; the rows are copied."""
        copy = len(self._reserved)
        for extent, stack in self.stacks:
            rows = extent.rows(tokens)
            stack.rows[:, copy, :rows] = stack.rows[:, index, :rows]
        self._reserved.append(tokens)
        return True

    def rewind(self, index: int, tokens: int) -> None:
        """See `KVCache.rewind`; the dropped rows are set to zero."""
        for extent, stack in self.stacks:
            stack.rows[:, index, extent.rows(tokens) : extent.rows(self._reserved[index])].zero_()

    def tree_unsupported_reason(self) -> str | None:
        """None, as rows can be read from any slot, except where a row has several tokens."""
        return MANY_TOKENS if any(extent.every > 1 for extent in self.extents.values()) else None

    def move(self, index: int, slots: Sequence[int], start: int) -> None:
        """See `KVCache.move`."""
        moved = torch.tensor(slots, device=self.device)
        for _, stack in self.stacks:
            stack.rows[:, index, start : start + len(slots)] = stack.rows[:, index].index_select(1, moved)

    def remove_request(self, index: int) -> None:
        """See `KVCache.remove_request`; the freed rows are set to zero."""
        last = len(self._reserved) - 1
        for extent, stack in self.stacks:
            used, moved = extent.rows(self._reserved[index]), extent.rows(self._reserved[last])
            stack.rows[:, index, :used].zero_()
            if index != last:
                stack.rows[:, index, :moved] = stack.rows[:, last, :moved]
                stack.rows[:, last, :moved].zero_()
        self._reserved[index] = self._reserved[last]
        self._reserved.pop()

    def step(self, indices: Sequence[int], batch: RaggedBatch) -> ContiguousStep:
        """See `KVCache.step`; raises `WrongState` if rows of the step are not reserved."""
        for request, index in enumerate(indices):
            end = batch.end(request)
            if end > self._reserved[index] and self.memory:
                raise WrongState(f"{end} positions are needed, {self._reserved[index]} are reserved")
        return ContiguousStep(self, indices, batch)

    def export_rows(self, index: int, tokens: int) -> dict[FieldKey, Tensor]:
        """See `KVCache.export_rows`."""
        if tokens > self._reserved[index] and self.memory:
            raise WrongState(f"the rows of {tokens} tokens are needed, {self._reserved[index]} are reserved")
        return {
            (*state, name): rows[index, extent.first(tokens) : extent.rows(tokens)]
            for state, extent in self.extents.items()
            for name, rows in self.memory[state].items()
        }

    def start_at(self, index: int, tokens: int) -> None:
        """Nothing to do: a row's slot is its position."""

    def import_rows(self, index: int, tokens: int, rows: Mapping[FieldKey, Tensor]) -> None:
        """See `KVCache.import_rows`."""
        for (layer, state, name), given in rows.items():
            end = self.extents[layer, state].rows(tokens)
            self.memory[layer, state][name][index, end - len(given) : end] = given.to(self.device)

    def live_bytes(self, index: int, tokens: int) -> int:
        """Bytes of the last `window` of `tokens` rows of every field."""
        total = 0
        for state, fields in self.memory.items():
            extent = self.extents[state]
            first = 0 if extent.window is None else max(0, tokens - extent.window)
            total += sum(rows[index, first : extent.rows(tokens)].nbytes for rows in fields.values())
        return total

    def _allocate(self, extent: Extent, count: int, field: Field, dtype: torch.dtype) -> Tensor:
        lead, rest = (field.shape[:1], field.shape[1:]) if len(field.shape) > 1 else ((), field.shape)
        memory = lazy_zeros((count, self.max_requests, *lead, extent.rows(self.capacity), *rest), dtype, self.device)
        return memory.transpose(2, 3) if lead else memory


@dataclass(frozen=True, eq=False)
class ContiguousRows:
    """The rows that some requests attend to in states of one extent.

    `positions` [requests, longest]; `key_padding_mask` [requests, longest], bool, is True for real rows, None if all
    are real; `memory` is the cache or a slice of it. `gather` [requests] selects requests that are not adjacent in
    memory; in a draft tree it is a pair of indices, requests [requests, 1] and slots [requests, longest].
    """

    positions: Tensor
    key_padding_mask: Tensor | None
    memory: Mapping[StateKey, Fields]
    gather: Tensor | tuple[Tensor, Tensor] | None

    def rows(self, state: StateKey) -> Rows:
        """The rows of one state of one layer."""
        fields = self.memory[state]
        if isinstance(self.gather, tuple):
            fields = {name: rows[self.gather] for name, rows in fields.items()}
        elif self.gather is not None:
            fields = {name: rows.index_select(0, self.gather) for name, rows in fields.items()}
        return Rows(fields=fields, positions=self.positions, key_padding_mask=self.key_padding_mask)


class ContiguousStep(CachedStep[ContiguousKVCache, ContiguousRows]):
    """One engine step; index tensors are computed once and used by all layers."""

    def __init__(self, cache: ContiguousKVCache, indices: Sequence[int], batch: RaggedBatch) -> None:
        super().__init__(cache, indices, batch)
        self._destinations: dict[Extent, tuple[Tensor, Tensor] | tuple[slice, int]] = {}
        self._in_place: dict[tuple[Extent, int], tuple[Tensor, Tensor, tuple[int, ...]]] = {}

    def view(self, layer: str, state: str) -> ContiguousView:
        """The view of one state of one layer."""
        return ContiguousView(self, layer, state, self.cache.memory[layer, state])

    def write(self, extent: Extent, memory: Tensor, rows: Tensor) -> None:
        """Write the new rows [rows, ...] of the batch into `memory` [requests, positions, ...]."""
        rows = rows.detach().to(memory.dtype)
        if len(self.indices) == 1 and not self.batch.paths:
            start = extent.rows(self.batch.contexts[0])
            memory[self.indices[0], start : start + len(rows)] = rows
            return
        if extent not in self._destinations:
            self._destinations[extent] = self._destination(extent)
        memory[self._destinations[extent]] = rows

    def _destination(self, extent: Extent) -> tuple[Tensor, Tensor] | tuple[slice, int]:
        """The request and the slot of each new row of states of one extent, [rows] each; neighbouring requests and one
        slot, where all add a row at the same one, which is written without an index of each row."""
        first, contexts = self.indices[0], set(self.batch.contexts)
        together = self.indices == tuple(range(first, first + len(self.indices)))
        if extent.every == 1 and together and len(contexts) == 1 and self.batch.decoding and not self.batch.paths:
            return slice(first, first + len(self.indices)), contexts.pop()
        indices = torch.tensor(self.indices, device=self.cache.device)
        if extent.every == 1:
            return indices[self.batch.request_of.to(self.cache.device)], self._new_slots()
        rows = [torch.tensor([*each], dtype=torch.int64, device=self.cache.device) for each in self.new_rows(extent)]
        numbers = torch.tensor([len(each) for each in rows], device=self.cache.device)
        return indices.repeat_interleave(numbers), torch.cat(rows)

    def in_place(self, extent: Extent, memory: Fields) -> RowsInPlace | None:
        """Addresses of the rows of all requests of the batch, computed once for all layers of an extent.

        None where the fields of a state differ in the distance between requests, so one index cannot address them.
        """
        strides = {rows.stride(0) // rows.stride(1) for rows in memory.values()}
        if len(strides) > 1:
            return None
        key = extent, strides.pop()
        if key not in self._in_place:
            self._in_place[key] = self._flat_indices(*key)
        return RowsInPlace({name: _flat_rows(rows) for name, rows in memory.items()}, *self._in_place[key])

    def _flat_indices(self, extent: Extent, stride: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Flat row indices of the new tokens [tokens] and of all visible rows [requests, longest], and the first
        visible position of each request; requests are `stride` rows apart."""
        batch = self.batch
        starts = torch.tensor(self.indices, device=self.cache.device) * stride
        firsts, ends = self.bounds(extent, range(batch.requests))
        longest = max(end - first for first, end in zip(firsts, ends, strict=True))
        bounds = torch.tensor([firsts, ends], device=self.cache.device)
        positions = bounds[0, :, None] + torch.arange(longest, device=self.cache.device)
        visible = positions.minimum(bounds[1, :, None] - 1)
        indices = starts[:, None] + slots_at(batch, range(batch.requests), visible, firsts)
        return starts[batch.request_of] + self._new_slots(), indices, tuple(firsts)

    def _new_slots(self) -> Tensor:
        """The slot of each new row [tokens]."""
        if not self.batch.paths:
            return self.batch.positions
        slots = [slot for request in range(self.batch.requests) for slot in self.batch.places(request)]
        return torch.tensor(slots, device=self.cache.device)

    def _select(self, extent: Extent, requests: tuple[int, ...]) -> ContiguousRows:
        firsts, ends = self.bounds(extent, requests)
        first, end = min(firsts), max(ends)
        positions = torch.arange(first, end, device=self.cache.device).expand(len(requests), -1)
        key_padding_mask = None
        if min(ends) < end or max(firsts) > first:
            bounds = torch.tensor([firsts, ends], device=self.cache.device)
            key_padding_mask = (positions >= bounds[0, :, None]) & (positions < bounds[1, :, None])
        positions = positions * extent.every + extent.every - 1
        indices = [self.indices[r] for r in requests]
        if any(self.batch.path(r) for r in requests):
            slots = slots_at(self.batch, requests, positions, [first] * len(requests))
            at = torch.tensor(indices, device=self.cache.device)[:, None]
            return ContiguousRows(
                positions, key_padding_mask, self._memory_of(extent, slice(None), slice(None)), (at, slots)
            )
        if indices == list(range(indices[0], indices[0] + len(indices))):
            memory, gather = self._memory_of(extent, slice(indices[0], indices[-1] + 1), slice(first, end)), None
        else:
            memory = self._memory_of(extent, slice(None), slice(first, end))
            gather = torch.tensor(indices, device=self.cache.device)
        return ContiguousRows(positions, key_padding_mask, memory, gather)

    def _memory_of(self, extent: Extent, requests: slice, positions: slice) -> Mapping[StateKey, Fields]:
        found: dict[FieldKey, Tensor] = {}
        for kept, stack in self.cache.stacks:
            if kept == extent:
                found |= zip(stack.keys, stack.rows[:, requests, positions].unbind(0), strict=True)
        return by_state(found)


class ContiguousView:
    """The view of one state of one layer in a step; implements `attn_core.batch.PagedView`.

    `rows` returns views of the cache's own memory: valid until the step ends, and not to be written to.
    """

    def __init__(self, step: ContiguousStep, layer: str, state: str, memory: Mapping[str, Tensor]) -> None:
        self._step = step
        self._key = (layer, state)
        self._extent = step.cache.extents[layer, state]
        self._memory = memory

    def append(self, fields: Fields) -> Fields:
        """Write this step's rows, [tokens, ...] each; raises `InvalidValue` for other fields or shapes."""
        check_names(".".join(self._key), fields, self._memory)
        every = self._extent.every
        count = self._step.tokens if every == 1 else sum(map(len, self._step.new_rows(self._extent)))
        for name, memory in self._memory.items():
            check_shape(".".join((*self._key, name)), fields[name], (count, *memory.shape[2:]))
            self._step.write(self._extent, memory, fields[name])
        return fields

    def rows(self, requests: Sequence[int]) -> Rows:
        """All rows these requests attend to, [requests, longest, ...] each.

        Where lengths differ, `Rows.key_padding_mask` marks the real rows; the others are zero or outside the window.
        """
        return self._step.select(self._extent, requests).rows(self._key)

    def in_place(self) -> RowsInPlace | None:
        """Addresses of the rows of all requests of the batch in the cache's memory."""
        return self._step.in_place(self._extent, self._memory)


def _flat_rows(memory: Tensor) -> Tensor:
    """Memory [requests, positions, ...] viewed as [rows, ...]: position p of request r is row r * stride + p.

    With a leading heads axis, heads are `positions` rows apart, so the view of a row reaches over its request's rows.
    """
    requests, positions = memory.shape[:2]
    stride = memory.stride(0) // memory.stride(1)
    shape = ((requests - 1) * stride + positions, *memory.shape[2:])
    return memory.as_strided(shape, memory.stride()[1:])
