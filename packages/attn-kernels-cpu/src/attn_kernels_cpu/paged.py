"""Attention of new tokens to cached rows, which are read where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from weakref import WeakKeyDictionary, ref

import torch
from attn_core import AttentionSpec, RaggedBatch
from attn_core.batch import RowsInPlace
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from attn_core.kernels.base import batch_invariant
from torch import Tensor

from attn_kernels_cpu.forms import FORMS
from attn_kernels_cpu.library import LatentAttentionStruct, MemoryStruct, PagedAttentionStruct, library

MEMORY = {"plain": ("float32", "bfloat16"), "int8": ("int8",), "float16": ("float16",)}
"""The dtypes of rows that the kernels read, by `RowsInPlace.form`."""
NUMBERS = {name: FORMS[name].number for name in ("float32", "bfloat16", "int8")} | {"float16": 12}
"""`Format` of native/simd.hpp by the dtype of rows."""
Seen = tuple[Tensor, Tensor, Tensor]
"""The numbers of cache rows, and for each token the first of its own among them and how many they are."""

_SEEN: WeakKeyDictionary[RaggedBatch, dict[tuple[int | None, int], Seen]] = WeakKeyDictionary()
"""What the tokens of each live batch see, by window and by identity of the store's row numbers."""


def window_of(spec: AttentionSpec) -> int | None:
    """How many tokens a token sees, itself included; None for all before it."""
    return None if spec.mask.lookback is None else spec.mask.lookback + 1


def scale_of(spec: AttentionSpec) -> float:
    """The factor of scores of scaled dot products."""
    scale: float | None = getattr(spec.score, "scale", None)
    return scale or spec.heads.key_size**-0.5


def seen(batch: RaggedBatch, window: int | None, rows: RowsInPlace) -> Seen:
    """The cache rows that each token of a batch sees, computed once per batch."""
    known = _SEEN.setdefault(batch, {})
    key = window, id(rows.kv_indices)
    if key not in known:
        longest = rows.kv_indices.shape[1]
        bases = torch.tensor([request * longest - first for request, first in enumerate(rows.firsts)])
        oldest = torch.zeros_like(batch.positions) if window is None else (batch.positions - window + 1).clamp_(min=0)
        count = (batch.positions - oldest + 1).to(torch.int32)
        # The numbers are kept as they are, too, so that their `id` is not reused.
        known[key] = rows.kv_indices, bases[batch.request_of] + oldest, count
    return known[key]


class Memory:
    """The kernel argument for the rows of a field, [rows, heads, size], or [rows, size] of one head; that of the last
    tensor is cached."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._last: Callable[[], Tensor | None] = lambda: None
        self._struct: MemoryStruct | None = None

    def of(self, rows: RowsInPlace) -> MemoryStruct | None:
        """The struct; None for a form, dtype or layout that the kernels do not support."""
        coded = rows.form != "plain"
        memory = rows.fields.get(f"{self._field}.codes" if coded else self._field)
        if memory is None or self._last() is memory:
            return None if memory is None else self._struct
        dtype = str(memory.dtype).removeprefix("torch.")
        readable = dtype in MEMORY[rows.form] and memory.ndim in {2, 3} and memory.stride(-1) == 1
        at = memory.data_ptr(), memory.stride(0), memory.stride(1) if memory.ndim == 3 else 0
        scales = rows.fields.get(f"{self._field}.scale")
        scaled = () if scales is None else (scales.data_ptr(), *scales.stride())
        self._struct = MemoryStruct(*at, NUMBERS[dtype], *scaled) if readable else None
        self._last = ref(memory)
        return self._struct


def attend(spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
    """The output [tokens, heads, value_size] in float32; of requests that are not asked for, undefined.

    Raises `InvalidValue` for a cache in another dtype or layout than the kernels read.
    """
    batch, heads = operands.batch, spec.heads
    numbers, start, count = seen(batch, window_of(spec), operands.rows)
    query, asked = operands.query, None
    if len(operands.requests) < batch.requests:
        asked = torch.isin(batch.request_of, torch.tensor(operands.requests)).nonzero()[:, 0]
        query, start, count = query[asked], start[asked], count[asked]
    query, numbers = query.contiguous(), numbers.contiguous()
    out = torch.empty(*query.shape[:2], heads.value_size)
    latent = "latent" in operands.rows.fields
    # Latents without rotary keys have no other elements of keys, of which then none is read.
    rest = "rotary_key" if "rotary_key" in operands.rows.fields else "latent"
    one, other = (Memory(name).of(operands.rows) for name in (("latent", rest) if latent else ("key", "value")))
    if one is None or other is None or one.format != other.format:
        given = {name: field.dtype for name, field in operands.rows.fields.items()}
        raise InvalidValue.of("cache", given, "rows [rows, heads, size] in float32, bfloat16, float16 or int8")
    memory = query.data_ptr(), out.data_ptr(), one, other
    tokens = numbers.data_ptr(), start.data_ptr(), count.data_ptr(), len(query), torch.get_num_threads()
    struct: ctypes.Structure
    if latent:
        sizes = heads.query, heads.value_size, heads.key_size - heads.value_size
        struct = LatentAttentionStruct(*memory, *sizes, *tokens, scale_of(spec))
        library().attn_attend_latents(ctypes.addressof(struct))
    else:
        sizes = heads.query, heads.key_value, heads.key_size
        struct = PagedAttentionStruct(*memory, *sizes, *tokens, scale_of(spec), batch_invariant())
        library().attn_attend_paged(ctypes.addressof(struct))
    if asked is None:
        return out
    whole = out.new_empty(len(operands.query), *out.shape[1:])
    whole[asked] = out
    return whole
