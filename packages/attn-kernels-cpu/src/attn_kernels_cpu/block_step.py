"""Steps of whole decoder blocks, and the addresses of the cache rows that they read and write."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from attn_core import LayerState, RaggedBatch, Rotary
from attn_core.batch import RowsInPlace
from attn_core.kernels.base import batch_invariant
from attn_core.kernels.block import BlockParts
from attn_core.kernels.product import FORMS
from torch import Tensor

from attn_kernels_cpu.library import BlockStruct, LayerStruct, StepStruct, library
from attn_kernels_cpu.paged import Memory, scale_of, seen, window_of

TILE = 32
"""The number of elements of a head in one AMX tile."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """The part of a step that all layers of one kind share; `held` keeps the tensors alive that `struct` points to."""

    struct: StepStruct
    address: int
    rotated: int
    held: tuple[Tensor | None, ...]


Kind = tuple[int | None, Rotary | None]
"""The window and the rotary embedding of a layer."""

_KINDS: dict[Kind, int] = {}
"""A number for each kind, which is faster to look up."""

_PREPARED: WeakKeyDictionary[RaggedBatch, dict[tuple[int, int], Prepared]] = WeakKeyDictionary()
"""The prepared steps by batch, and by number of the kind of layer and identity of the store's row numbers."""


def prepared(batch: RaggedBatch, rows: RowsInPlace, of_kind: CpuBlockStep, hidden: Tensor) -> Prepared:
    """The step of a batch over these cache rows for layers of one kind, computed once per batch.

    With a window, a token sees itself and the `window` - 1 tokens before it.
    """
    known = _PREPARED.get(batch)
    if known is None:
        known = _PREPARED[batch] = {}
    key = of_kind.kind, id(rows.kv_indices)
    found = known.get(key)
    if found is None:
        found = known[key] = _prepare(batch, of_kind.window, rows, of_kind.parts.attention.cos_sin(hidden, batch))
    return found


def _prepare(
    batch: RaggedBatch, window: int | None, rows: RowsInPlace, cos_sin: tuple[Tensor, Tensor] | None
) -> Prepared:
    numbers, start, count = seen(batch, window, rows)
    cosines, sines = (turn.contiguous() for turn in cos_sin) if cos_sin is not None else (None, None)
    held = cosines, sines, rows.slot_mapping, numbers.contiguous(), start, count
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in held]
    struct = StepStruct(len(batch.positions), torch.get_num_threads(), *addresses, batch_invariant())
    # A reference to the original row numbers is kept, too, so that their `id` is not reused.
    return Prepared(
        struct, ctypes.addressof(struct), 0 if cosines is None else cosines.shape[-1], (*held, rows.kv_indices)
    )


class CpuBlockStep:
    """Computes the steps of one block; implements `attn_core.kernels.block.BlockStep`."""

    composed = True

    def __init__(self, parts: BlockParts) -> None:
        self.parts = parts
        attention, gated = parts.attention, parts.feed_forward
        spec, heads = attention.spec, attention.spec.heads
        heads_gains = (attention.gains[name] if attention.gains else None for name in ("query_gain", "key_gain"))
        given = parts.attention_gain, parts.feed_forward_gain, *heads_gains, parts.attended_gain, parts.fed_gain
        self._gains = [None if gain is None else gain.detach().float().contiguous() for gain in given]
        self.window = window_of(spec)
        self.kind = _KINDS.setdefault((self.window, spec.rotary), len(_KINDS))
        self._block = BlockStruct(
            attention.projections.address,
            attention.output.address,
            gated.both.address,
            gated.down.address,
            *(None if gain is None else gain.data_ptr() for gain in self._gains),
            parts.eps,
            spec.norm.eps if spec.norm else 0.0,
            scale_of(spec),
            heads.query,
            heads.key_value,
            heads.key_size,
            0,
            int(spec.rotary is not None and spec.rotary.interleaved),
            attention.projections.attention if spec.mask.lookback is None and heads.key_size % TILE == 0 else 0,
            FORMS.index(gated.activation),
        )
        self._key, self._value = Memory("key"), Memory("value")
        self.layer = LayerStruct(ctypes.addressof(self._block))

    def step(self, hidden: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor | None:
        """Update `hidden` [tokens, width] in place and return it; None if the kernels cannot access keys and values."""
        return CpuStackStep([self]).step(hidden, batch, [state])

    def reach(self, state: LayerState) -> RowsInPlace | None:
        """Point `layer` to the cache of a state and return its rows; None if the kernels cannot access them."""
        view = state.get("kv")
        in_place = getattr(view, "in_place", None) or getattr(view, "coded_in_place", None)
        rows: RowsInPlace | None = in_place() if in_place is not None else None
        if rows is None:
            return None
        key, value = self._key.of(rows), self._value.of(rows)
        if key is None or value is None:
            return None
        self.layer.key, self.layer.value = key, value
        return rows

    def follow(self, found: Prepared) -> None:
        """Use this prepared step for the next call."""
        self.layer.step, self._block.rotated = found.address, found.rotated


class CpuStackStep:
    """Computes the steps of blocks in one call; implements `attn_core.kernels.block.StackStep`."""

    def __init__(self, blocks: Sequence[CpuBlockStep]) -> None:
        self._blocks = tuple(blocks)
        self._layers = (ctypes.c_void_p * len(blocks))(*(ctypes.addressof(block.layer) for block in blocks))
        self._run = library().attn_blocks

    def step(self, hidden: Tensor, batch: RaggedBatch, states: Iterable[LayerState]) -> Tensor | None:
        """Update `hidden` [tokens, width] in place and return it; None if the kernels cannot access keys and values."""
        if hidden.dtype != torch.float32:
            return None
        found: dict[tuple[int, int], Prepared] = {}
        for block, state in zip(self._blocks, states, strict=True):
            rows = block.reach(state)
            if rows is None:
                return None
            key = block.kind, id(rows.kv_indices)
            if key not in found:
                found[key] = prepared(batch, rows, block, hidden)
            block.follow(found[key])
        out = hidden.contiguous()
        self._run(self._layers, len(self._blocks), out.data_ptr())
        return out
