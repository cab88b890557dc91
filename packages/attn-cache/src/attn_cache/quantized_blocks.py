"""A paged KV cache that quantizes full blocks (KIVI) and keeps the unfinished block of each request unquantized.

A block is encoded once, from the rows that were written, when its last row is written. Codes are never re-encoded, so
quantization errors do not accumulate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from attn_core import Field, Fields, Paged, RaggedBatch, StateSpec
from attn_core.batch import Rows
from attn_core.errors import WrongState
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor, dtype

from attn_cache.block_table import BlockPool
from attn_cache.kv_cache import CachedStep, Extent, Window, fields_of, first_visible
from attn_cache.memory import (
    FieldKey,
    StateKey,
    allocate_stacks,
    by_state,
    check_names,
    check_shape,
    field_tensors,
    lazy_zeros,
    states_of,
)
from attn_cache.paged import PagedKVCache
from attn_cache.portable import StateLayout
from attn_cache.prefix_cache import SharedStore
from attn_cache.quantization import KiviLayout

NEWEST = ".newest"
"""Suffix of a state's name for its unquantized rows, in exported states."""


@dataclass(frozen=True)
class QuantizedBlocks(Paged):
    """An exported state: the codes of full blocks, one row per block of `block` tokens."""

    block: int = 1


@dataclass(frozen=True)
class NewestRows(Paged):
    """An exported state: the unquantized rows after the last full block of `block` tokens."""

    block: int = 1


def visible(tokens: int, window: Window, block: int) -> tuple[range, range]:
    """The full blocks (by number), and the positions after them, that the token after the first `tokens` attends to."""
    first, full = first_visible(tokens, window), tokens // block
    return range(min(first // block, full), full), range(max(first, full * block), tokens)


class QuantizedBlockLayout(StateLayout):
    """The exported states of a model in a store of quantized blocks."""

    def __init__(self, specs: ModelSpecs, layout: KiviLayout, dtype: str) -> None:
        super().__init__(_exported_specs(specs, layout), dtype)

    def _count(self, spec: StateSpec, tokens: int, first: Tensor) -> int:
        if isinstance(spec, QuantizedBlocks):
            return len(visible(tokens, spec.window, spec.block)[0])
        if isinstance(spec, NewestRows):
            return len(visible(tokens, spec.window, spec.block)[1])
        return super()._count(spec, tokens, first)


def _exported_specs(specs: ModelSpecs, layout: KiviLayout) -> ModelSpecs:
    found: dict[str, dict[str, StateSpec]] = {}
    for layer, states in layout.specs(specs).items():
        found[layer] = {}
        for name, coded in states.items():
            plain = specs[layer][name]
            if isinstance(plain, Paged):
                found[layer][name] = QuantizedBlocks(coded.fields, window=plain.window, block=layout.block)
                found[layer][name + NEWEST] = NewestRows(plain.fields, window=plain.window, block=layout.block)
            else:
                found[layer][name] = plain
    return found


class QuantizedBlockStore(SharedStore):
    """A prefix-sharing store of quantized blocks: requests with a common prefix share full, quantized blocks.

    The rows that a query attends to must not depend on how its prompt was chunked, so no chunk crosses the end of a
    block.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, layout: KiviLayout) -> None:
        blocks = QuantizedBlockKVCache(specs, size, layout)
        super().__init__(specs, size, blocks)
        self._layout = QuantizedBlockLayout(specs, layout, size.dtype)
        self._blocks = blocks
        self._block = layout.block

    def chunk(self, computed: int, length: int, prompt: int) -> int:
        """Like `SharedStore.chunk`, but not beyond the end of the current block."""
        return super().chunk(computed, min(length, self._block - computed % self._block), prompt)

    def rewind(self, request: int, tokens: int) -> int:
        """Like `Store.rewind`; within a quantized block back to its start, because its unquantized rows are gone."""
        coded = tokens < self._blocks.first_unquantized(self._index(request))
        return super().rewind(request, tokens // self._block * self._block if coded else tokens)


class QuantizedBlockKVCache(PagedKVCache):
    """`memory` holds the codes of full blocks, one row per block; `plain` the rows of unfinished blocks.

    The block for the codes is allocated with the first row of a block, so that quantizing it cannot run out of memory;
    the block of its unquantized rows is freed afterwards.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, layout: KiviLayout) -> None:
        self.layout = layout
        super().__init__(layout.specs(specs), size, layout.block)
        self.fields = {(layer, state): spec.fields for layer, state, spec in states_of(specs, Paged)}
        # The lowest free block is allocated first, and memory is committed when touched, so few blocks ever use any.
        self.unfinished = {window: BlockPool(None, self.num_blocks, layout.block) for window in self.pools}
        stacks = [
            stack
            for window in self.pools
            for stack in allocate_stacks(fields_of(specs, Extent(window)), size.dtype, self._allocate_plain)
        ]
        self.plain = by_state(field_tensors(stacks))

    def add_request(self) -> None:
        """See `KVCache.add_request`."""
        super().add_request()
        for pool in self.unfinished.values():
            pool.add_request()

    def reserve(self, index: int, tokens: int) -> bool:
        """Like `PagedKVCache.reserve`; also allocates blocks for unquantized rows."""
        for pool in self.unfinished.values():
            pool.free_before(index, self._computed[index])
        if not super().reserve(index, tokens):
            return False
        for pool in self.unfinished.values():
            pool.allocate(index, pool.missing(index, tokens))
        return True

    def share(self, index: int, tokens: int, blocks: Sequence[Mapping[Window, int]]) -> None:
        """Like `PagedKVCache.share`; cached blocks are full, so they are quantized."""
        super().share(index, tokens, blocks)
        for pool in self.unfinished.values():
            pool.share(index, tokens // self.block_size, [])

    def fork(self, index: int, tokens: int) -> bool:
        """Like `PagedKVCache.fork`; full blocks are shared, the rows of the unfinished block are copied."""
        if not super().fork(index, tokens):
            return False
        for window, pool in self.unfinished.items():
            copied = pool.fork(index, tokens)
            if copied is not None:
                source, copy = (self._rows_of(block, self.block_size) for block in copied)
                for state, fields in self.plain.items():
                    if self.extents[state].window == window:
                        for rows in fields.values():
                            rows[copy] = rows[source]
        return True

    def rewind(self, index: int, tokens: int) -> None:
        """Like `PagedKVCache.rewind`; blocks that are already quantized, and may be shared, are freed and replaced."""
        if tokens < self.first_unquantized(index):
            for pool in (*self.pools.values(), *self.unfinished.values()):
                pool.truncate(index, tokens)
        super().rewind(index, tokens)

    def first_unquantized(self, index: int) -> int:
        """The position from which on all rows of the request are still unquantized."""
        firsts = [pool.tables[index].first * self.block_size for pool in self.unfinished.values()]
        return max(firsts, default=0)

    def tree_unsupported_reason(self) -> str | None:
        """A full block is quantized at once, so rows of a draft tree would be quantized before they are accepted."""
        return "blocks are quantized as soon as they are full, before it is known which draft tokens are accepted"

    def export_rows(self, index: int, tokens: int) -> dict[FieldKey, Tensor]:
        """Codes [blocks, ...] of the full blocks that the token after the first `tokens` attends to, and the rows
        [rows, ...] after them under the state's name with the suffix `NEWEST`.

        Raises `WrongState` where they are not computed, or rows after the last full block are already quantized.
        """
        full = tokens // self.block_size * self.block_size
        if self.pools and (tokens > self._computed[index] or (full < tokens and full < self.first_unquantized(index))):
            raise WrongState(f"the rows of {tokens} tokens are needed; they are not computed, or quantized already")
        at = {window: self._visible_rows(window, index, tokens) for window in self.pools}
        coded = {
            (*state, name): rows.index_select(0, at[self.extents[state].window][0])
            for state, parts in self.memory.items()
            for name, rows in parts.items()
        }
        plain = {
            (layer, state + NEWEST, name): rows.index_select(0, at[self.extents[layer, state].window][1])
            for (layer, state), fields in self.plain.items()
            for name, rows in fields.items()
        }
        return coded | plain

    def start_at(self, index: int, tokens: int) -> None:
        """Like `PagedKVCache.start_at`; full blocks are quantized, so unquantized rows begin after them."""
        super().start_at(index, tokens)
        for pool in self.unfinished.values():
            pool.share(index, tokens // self.block_size, [])

    def import_rows(self, index: int, tokens: int, rows: Mapping[FieldKey, Tensor]) -> None:
        """See `KVCache.import_rows`."""
        at = {window: self._visible_rows(window, index, tokens) for window in self.pools}
        for (layer, name, field), given in rows.items():
            state = layer, name.removesuffix(NEWEST)
            blocks, newest = at[self.extents[state].window]
            if name.endswith(NEWEST):
                self.plain[state][field].index_copy_(0, newest, given.to(self.device))
            else:
                self.memory[state][field].index_copy_(0, blocks, given.to(self.device))

    def remove_request(self, index: int) -> None:
        """See `KVCache.remove_request`."""
        super().remove_request(index)
        for pool in self.unfinished.values():
            pool.remove_request(index)

    def step(self, indices: Sequence[int], batch: RaggedBatch) -> QuantizedBlockStep:
        """See `KVCache.step`; raises `WrongState` if rows of the step are not reserved."""
        self._begin(indices, batch)
        return QuantizedBlockStep(self, indices, batch)

    def live_bytes(self, index: int, tokens: int) -> int:
        """Bytes of the codes of full blocks and of the unquantized rows after them, within the window."""
        full = tokens // self.block_size
        total = 0
        for state, parts in self.memory.items():
            window = self.extents[state].window
            first = 0 if window is None else max(0, tokens - window)
            coded, plain = self.pools[window].tables[index], self.unfinished[window].tables[index]
            blocks = min(full, coded.first + len(coded.blocks)) - max(first // self.block_size, coded.first)
            total += max(0, blocks) * sum(rows[0].nbytes for rows in parts.values())
            rows = min(tokens, plain.end) - max(first, full * self.block_size, plain.first * self.block_size)
            total += max(0, rows) * sum(field[0].nbytes for field in self.plain[state].values())
        return total

    def _visible_rows(self, window: Window, index: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Blocks of codes, and rows of `plain`, that the token after the first `tokens` attends to."""
        coded, plain = self.pools[window].tables[index], self.unfinished[window].tables[index]
        blocks, positions = visible(tokens, window, self.block_size)
        numbers = [coded.blocks[number - coded.first] for number in blocks]
        found = ([*numbers], [plain.slot(position) for position in positions])
        first, second = (torch.tensor(values, dtype=torch.int64, device=self.device) for values in found)
        return first, second

    def _copy_block(self, window: Window, source: int, copy: int) -> None:
        """Nothing to copy: an unfinished block has no codes yet."""

    def _allocate(self, extent: Extent, count: int, field: Field, kind: dtype) -> Tensor:  # noqa: ARG002 -- a row per block
        return lazy_zeros((count, 1 + self.num_blocks, *field.shape), kind, self.device)

    def _allocate_plain(self, count: int, field: Field, kind: dtype) -> Tensor:
        return lazy_zeros((count, (1 + self.num_blocks) * self.block_size, *field.shape), kind, self.device)


@dataclass(frozen=True, eq=False)
class Destination:
    """Where a step writes: `slots` [tokens] are the rows of `plain` for the new tokens; for the blocks that these
    complete, `plain_blocks` [blocks] are the unquantized blocks to read, and `coded_blocks` [blocks] those to write
    codes to."""

    slots: Tensor
    plain_blocks: Tensor
    coded_blocks: Tensor


@dataclass(frozen=True, eq=False)
class QuantizedSelection:
    """The rows that some requests attend to under one window.

    The result is laid out as [requests * longest, ...]: blocks `coded_blocks` are decoded to the rows `to_coded`, rows
    `plain_slots` of unquantized memory are copied to the rows `to_plain`. `key_padding_mask` [requests, longest], bool,
    is True for real rows, None if all are real.
    """

    positions: Tensor
    key_padding_mask: Tensor | None
    coded_blocks: Tensor
    to_coded: Tensor
    plain_slots: Tensor
    to_plain: Tensor


class QuantizedBlockStep(CachedStep[QuantizedBlockKVCache, QuantizedSelection]):
    """One engine step: queries attend to codes of the blocks that were full before it and to unquantized newer rows."""

    def __init__(self, cache: QuantizedBlockKVCache, indices: Sequence[int], batch: RaggedBatch) -> None:
        super().__init__(cache, indices, batch)
        self._destinations: dict[Window, Destination] = {}

    def view(self, layer: str, state: str) -> QuantizedBlocksView:
        """The view of one state of one layer."""
        return QuantizedBlocksView(self, (layer, state))

    def destination(self, window: Window) -> Destination:
        """Where new rows are written and which blocks they complete; computed once for all layers of a window."""
        if window not in self._destinations:
            size = self.cache.block_size
            slots: list[int] = []
            full: list[tuple[int, int]] = []
            for index, context, length in zip(self.indices, self.batch.contexts, self.batch.lengths, strict=True):
                plain = self.cache.unfinished[window].tables[index]
                coded = self.cache.pools[window].tables[index]
                slots += [plain.slot(position) for position in range(context, context + length)]
                full += [
                    (plain.blocks[block - plain.first], coded.blocks[block - coded.first])
                    for block in range(context // size, (context + length) // size)
                ]
            self._destinations[window] = Destination(
                self._tensor(slots),
                self._tensor([block for block, _ in full]),
                self._tensor([block for _, block in full]),
            )
        return self._destinations[window]

    def _select(self, extent: Extent, requests: tuple[int, ...]) -> QuantizedSelection:
        window, size = extent.window, self.cache.block_size
        contexts = [self.batch.contexts[r] for r in requests]
        firsts = [first_visible(context, window) for context in contexts]
        ends = [self.batch.contexts[r] + self.batch.lengths[r] for r in requests]
        # Codes are decoded by full blocks, so rows of the first block may lie before the window.
        begins = [
            first // size * size if first < context // size * size else first
            for first, context in zip(firsts, contexts, strict=True)
        ]
        longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
        bounds = self._tensor([*begins, *firsts, *ends]).view(3, -1, 1)
        positions = bounds[0] + torch.arange(longest, device=self.cache.device)
        key_padding_mask = (positions >= bounds[1]) & (positions < bounds[2])
        blocks, slots, to_coded, to_plain = [], [], [], []
        for row, (r, begin, end) in enumerate(zip(requests, begins, ends, strict=True)):
            at = row * longest - begin
            full = max(begin, self.batch.contexts[r] // size * size)
            coded = self.cache.pools[window].tables[self.indices[r]]
            blocks += coded.blocks[begin // size - coded.first : full // size - coded.first]
            to_coded.append(torch.arange(at + begin, at + full))
            plain = self.cache.unfinished[window].tables[self.indices[r]]
            slots += [plain.slot(position) for position in range(full, end)]
            to_plain.append(torch.arange(at + full, at + end))
        return QuantizedSelection(
            positions,
            None if bool(key_padding_mask.all()) else key_padding_mask,
            self._tensor(blocks),
            torch.cat(to_coded).to(self.cache.device),
            self._tensor(slots),
            torch.cat(to_plain).to(self.cache.device),
        )

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.cache.device)


class QuantizedBlocksView:
    """The view of one state of one layer in a step; implements `attn_core.batch.PagedView`."""

    def __init__(self, step: QuantizedBlockStep, key: StateKey) -> None:
        self._step = step
        self._key = key
        self._extent = step.cache.extents[key]
        self._fields = step.cache.fields[key]
        self._plain = step.cache.plain[key]
        self._coded = step.cache.memory[key]

    def append(self, fields: Fields) -> Fields:
        """Write this step's rows, [tokens, ...] each, and quantize the blocks that they complete.

        Raises `InvalidValue` for other fields or shapes.
        """
        check_names(".".join(self._key), fields, self._plain)
        layout = self._step.cache.layout
        destination = self._step.destination(self._extent.window)
        for name, memory in self._plain.items():
            rows = fields[name]
            check_shape(".".join((*self._key, name)), rows, (self._step.tokens, *memory.shape[1:]))
            memory.index_copy_(0, destination.slots, rows.detach().to(memory.dtype))
            if len(destination.coded_blocks):
                blocks = memory.view(-1, layout.block, *memory.shape[1:]).index_select(0, destination.plain_blocks)
                for part, codes in layout.encode(name, self._fields[name], blocks).items():
                    self._coded[part].index_copy_(0, destination.coded_blocks, codes)
        return fields

    def rows(self, requests: Sequence[int]) -> Rows:
        """All rows these requests attend to, [requests, longest, ...] each, padded with zeros."""
        selection = self._step.select(self._extent, requests)
        fields = {name: self._rows(name, plain, selection) for name, plain in self._plain.items()}
        return Rows(fields=fields, positions=selection.positions, key_padding_mask=selection.key_padding_mask)

    def _rows(self, name: str, plain: Tensor, selection: QuantizedSelection) -> Tensor:
        field, layout = self._fields[name], self._step.cache.layout
        rows = plain.new_zeros((selection.positions.numel(), *field.shape))
        if len(selection.coded_blocks):
            stored = {
                part: self._coded[part].index_select(0, selection.coded_blocks) for part in layout.parts(name, field)
            }
            blocks = layout.decode(name, field, stored, plain.dtype)
            rows.index_copy_(0, selection.to_coded, blocks.flatten(0, 1))
        rows.index_copy_(0, selection.to_plain, plain.index_select(0, selection.plain_slots))
        return rows.view(*selection.positions.shape, *field.shape)
