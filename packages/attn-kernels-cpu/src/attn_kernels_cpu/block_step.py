"""One step of whole blocks, and where the rows of a step lie."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from attn_core import LayerState, RaggedBatch, Rotary
from attn_core.batch import RowsInPlace
from attn_core.kernels.block import BlockParts
from torch import Tensor

from attn_kernels_cpu.forms import FORMS
from attn_kernels_cpu.library import BlockStruct, LayerStruct, MemoryStruct, StepStruct, library

TILE = 32
"""Elements of a head that are multiplied in one tile."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """What the steps of all layers of one window have in common; `held` are the tensors that `struct` points to."""

    struct: StepStruct
    address: int
    rotated: int
    held: tuple[Tensor | None, ...]


Kind = tuple[int | None, Rotary | None]
"""Window and rotary positions of a layer."""

_KINDS: dict[Kind, int] = {}
"""A number for each kind, which is quicker to look up."""

_PREPARED: WeakKeyDictionary[RaggedBatch, dict[tuple[int, int], Prepared]] = WeakKeyDictionary()
"""By batch, number of the kind of layer and the store's row numbers."""


def prepared(batch: RaggedBatch, rows: RowsInPlace, of_kind: CpuBlockStep, hidden: Tensor) -> Prepared:
    """The step of a batch over these rows, for layers of one kind; a token sees itself and `window` - 1 before it."""
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
    longest = rows.kv_indices.shape[1]
    bases = torch.tensor([request * longest - first for request, first in enumerate(rows.firsts)])
    oldest = torch.zeros_like(batch.positions) if window is None else (batch.positions - window + 1).clamp_(min=0)
    start = bases[batch.request_of] + oldest
    count = (batch.positions - oldest + 1).to(torch.int32)
    cosines, sines = (turn.contiguous() for turn in cos_sin) if cos_sin is not None else (None, None)
    held = cosines, sines, rows.slot_mapping, rows.kv_indices.contiguous(), start, count
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in held]
    struct = StepStruct(len(batch.positions), torch.get_num_threads(), *addresses)
    # The row numbers are held as they came too, so that no others can take their place in memory.
    return Prepared(
        struct, ctypes.addressof(struct), 0 if cosines is None else cosines.shape[-1], (*held, rows.kv_indices)
    )


class CpuBlockStep:
    """Computes the steps of one block; implements `attn_core.kernels.block.BlockStep`."""

    def __init__(self, parts: BlockParts) -> None:
        self.parts = parts
        attention, gated = parts.attention, parts.feed_forward
        spec, heads = attention.spec, attention.spec.heads
        scale = getattr(spec.score, "scale", None) or heads.key_size**-0.5
        self._gains = [gain.detach().float().contiguous() for gain in (parts.attention_gain, parts.feed_forward_gain)]
        self.window = None if spec.mask.lookback is None else spec.mask.lookback + 1
        self.kind = _KINDS.setdefault((self.window, spec.rotary), len(_KINDS))
        self._block = BlockStruct(
            attention.projections.address,
            attention.output.address,
            gated.both.address,
            gated.down.address,
            *(gain.data_ptr() for gain in self._gains),
            parts.eps,
            scale,
            heads.query,
            heads.key_value,
            heads.key_size,
            0,
            int(spec.rotary is not None and spec.rotary.interleaved),
            attention.projections.attention if spec.mask.lookback is None and heads.key_size % TILE == 0 else 0,
        )
        self._key, self._value = _Memory(), _Memory()
        self.layer = LayerStruct(ctypes.addressof(self._block))

    def step(self, hidden: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor | None:
        """What `hidden` [tokens, width] becomes, in its place; None where keys and values cannot be reached."""
        return CpuStackStep([self]).step(hidden, batch, [state])

    def reach(self, state: LayerState) -> RowsInPlace | None:
        """Where the rows of a step lie, which `layer` points to from now on; None where they cannot be reached."""
        in_place = getattr(state.get("kv"), "in_place", None)
        rows: RowsInPlace | None = in_place() if in_place is not None else None
        if rows is None:
            return None
        key, value = self._key.of(rows.fields["key"]), self._value.of(rows.fields["value"])
        if key is None or value is None:
            return None
        self.layer.key, self.layer.value = key, value
        return rows

    def follow(self, found: Prepared) -> None:
        """Take this step."""
        self.layer.step, self._block.rotated = found.address, found.rotated


class CpuStackStep:
    """Computes the steps of blocks in one call; implements `attn_core.kernels.block.StackStep`."""

    def __init__(self, blocks: Sequence[CpuBlockStep]) -> None:
        self._blocks = tuple(blocks)
        self._layers = (ctypes.c_void_p * len(blocks))(*(ctypes.addressof(block.layer) for block in blocks))
        self._run = library().attn_blocks

    def step(self, hidden: Tensor, batch: RaggedBatch, states: Iterable[LayerState]) -> Tensor | None:
        """What `hidden` [tokens, width] becomes, in its place; None where keys and values cannot be reached."""
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


class _Memory:
    """Memory [rows, heads, size] as the kernels know it; the last one is known, as long as it is there."""

    def __init__(self) -> None:
        self._last: Callable[[], Tensor | None] = lambda: None
        self._struct: MemoryStruct | None = None

    def of(self, memory: Tensor) -> MemoryStruct | None:
        """The struct; None for an element type that the kernels do not read."""
        if self._last() is memory:
            return self._struct
        form = str(memory.dtype).removeprefix("torch.")
        readable = form in ("float32", "bfloat16") and memory.ndim == 3 and memory.stride(2) == 1
        at = memory.data_ptr(), memory.stride(0), memory.stride(1)
        self._struct = MemoryStruct(*at, FORMS[form].number) if readable else None
        self._last = ref(memory)
        return self._struct
