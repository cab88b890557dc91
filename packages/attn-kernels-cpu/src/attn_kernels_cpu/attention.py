"""Softmax attention over whole sequences in float32, with gradients."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, cast

import torch
from attn_core.dropout import WORD, Dropout
from attn_core.errors import InvalidValue
from attn_core.first_order import first_order_only
from torch import Tensor

from attn_kernels_cpu.library import ADDRESS, library


class HeadsStruct(ctypes.Structure):
    """The struct `Heads4` of native/attend_whole.hpp."""

    _fields_ = (("at", ADDRESS), ("batch", ctypes.c_int64), ("token", ctypes.c_int64), ("head", ctypes.c_int64))

    @classmethod
    def of(cls, rows: Tensor) -> HeadsStruct:
        """The struct for a tensor [batch, heads, tokens, size], contiguous along its last axis."""
        return cls(rows.data_ptr(), rows.stride(0), rows.stride(2), rows.stride(1))


class AttentionStruct(ctypes.Structure):
    """The struct `WholeAttention` of native/attend_whole.hpp."""

    _fields_ = (
        ("query", HeadsStruct),
        ("key", HeadsStruct),
        ("value", HeadsStruct),
        ("out", HeadsStruct),
        ("logs", ADDRESS),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("shared_heads", ctypes.c_int32),
        ("queries", ctypes.c_int32),
        ("keys", ctypes.c_int32),
        ("key_size", ctypes.c_int32),
        ("value_size", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("dropout", ADDRESS),
    )


class DropoutStruct(ctypes.Structure):
    """The struct `Dropout` of native/dropout.hpp."""

    _fields_ = (
        ("seed_low", ctypes.c_uint32),
        ("seed_high", ctypes.c_uint32),
        ("offset", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("threshold", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    )

    @classmethod
    def of(cls, dropout: Dropout) -> DropoutStruct:
        """The struct for a dropout, its seed split into two 32-bit halves."""
        seed = int(dropout.seed)
        return cls(seed & WORD, seed >> 32 & WORD, dropout.offset, dropout.first, dropout.threshold, dropout.scale)


class ChangesStruct(ctypes.Structure):
    """The struct `WholeAttentionChange` of native/attend_whole.hpp."""

    _fields_ = (("change", HeadsStruct), ("query", HeadsStruct), ("key", HeadsStruct), ("value", HeadsStruct))


def side_by_side(rows: Tensor) -> Tensor:
    """The tensor, copied unless it is contiguous along its last axis."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def like(rows: Tensor, size: int) -> Tensor:
    """An empty tensor [batch, heads, tokens, size] in which the heads of a token are contiguous, as linear layers read
    them."""
    batch, heads, tokens, _ = rows.shape
    return torch.empty(batch, tokens, heads, size).transpose(1, 2)


class Weighing(NamedTuple):
    """The parameters that turn scores into weights: mask, scale and dropout."""

    causal: bool
    scale: float
    dropout: DropoutStruct | None


class Attention(torch.autograd.Function):
    """Attention over queries, keys and values, [batch, heads, tokens, size] each; saves lse instead of the weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: Weighing) -> Tensor:
        """Run the forward kernel, which computes the scores of some neighbouring queries at a time."""
        out, logs = like(query, value.shape[-1]), torch.empty(query.shape[:3])
        struct = described((query, key, value, out), logs, how)
        library().attn_attention(ctypes.byref(struct))
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.how = how
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward kernel, which recomputes the scores."""
        query, key, value, out, logs = ctx.saved_tensors
        struct = described((query, key, value, out), logs, ctx.how)
        found = [like(part, part.shape[-1]) for part in (query, key, value)]
        # The kernel adds the gradients of keys and values over many queries.
        for part in found[1:]:
            part.zero_()
        changes = ChangesStruct(*(HeadsStruct.of(rows) for rows in (side_by_side(change), *found)))
        library().attn_attention_changes(ctypes.byref(struct), ctypes.byref(changes))
        return (*found, None)


def described(rows: tuple[Tensor, Tensor, Tensor, Tensor], logs: Tensor, how: Weighing) -> AttentionStruct:
    """The kernel argument for queries, keys, values and outputs."""
    query, key, value, _ = rows
    sizes = query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2], key.shape[3], value.shape[3]
    places = (HeadsStruct.of(part) for part in rows)
    dropped = None if how.dropout is None else ctypes.addressof(how.dropout)
    return AttentionStruct(*places, logs.data_ptr(), *sizes, how.causal, how.scale, torch.get_num_threads(), dropped)


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float, dropout: Dropout | None = None
) -> Tensor:
    """softmax(scale q k^T) v for query [batch, heads, queries, key_size], key [batch, shared, keys, key_size] and value
    [batch, shared, keys, value_size], float32; `shared` divides `heads`.

    With `causal`, queries are aligned to the last keys and see none after their own. Results do not depend on the
    number of threads. `dropout` drops the same weights as plain attention does for the same seed. Raises `InvalidValue`
    for other dtypes, devices and shapes.
    """
    for name, rows in (("query", query), ("key", key), ("value", value)):
        if rows.dtype != torch.float32 or rows.device.type != "cpu" or rows.dim() != 4:
            given = f"{rows.dtype} {tuple(rows.shape)} on {rows.device}"
            raise InvalidValue.of(name, given, "torch.float32 [batch, heads, tokens, size] on the cpu")
    batch, heads, queries, size = query.shape
    shared, keys = key.shape[1:3]
    if (
        (key.shape[0], key.shape[3]) != (batch, size)
        or not shared
        or heads % shared
        or keys < (queries if causal else 1)
    ):
        allowed = f"[{batch}, a divisor of {heads}, {queries if causal else 1} or more, {size}]"
        raise InvalidValue.of("key", tuple(key.shape), allowed)
    if value.shape[:3] != key.shape[:3]:
        raise InvalidValue.of("value", tuple(value.shape), f"[{batch}, {shared}, {keys}, any]")
    operands = [side_by_side(part) for part in (query, key, value)]
    how = Weighing(causal, scale, None if dropout is None else DropoutStruct.of(dropout))
    return cast("Tensor", Attention.apply(*operands, how))  # type: ignore[no-untyped-call]
