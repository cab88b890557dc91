"""Rotary embedding of queries and keys, fused with writing keys and values to a paged cache."""

from __future__ import annotations

import triton.language as tl
from attn_core.batch import RowsInPlace
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_kernels_triton.checks import check_like
from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.rotary_append import Append, rotate_append
from attn_kernels_triton.kernels.rowwise import Angles
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.rowwise.rotary import Rotation, by_sequence, rotary_tile
from attn_kernels_triton.rowwise.rows import check_angles, check_rows, power


def rotate_appended(
    projected: tuple[Tensor, Tensor, Tensor], cos_sin: tuple[Tensor, Tensor], kept: RowsInPlace, *, interleaved: bool
) -> Tensor:
    """See `attn_core.RotaryKernel.rotate_appended`; raises `InvalidValue`, see `check_appended`.

    The caller must make sure that the slots of the cache may be written.
    """
    query = projected[0]
    check_appended(projected, cos_sin, kept)
    out = query.new_empty(query.shape)
    append_launch(projected, cos_sin, kept, out, interleaved=interleaved).run(query.device)
    return out


def check_appended(projected: tuple[Tensor, Tensor, Tensor], cos_sin: tuple[Tensor, Tensor], kept: RowsInPlace) -> None:
    """Raise `InvalidValue` for tensors whose shapes, dtypes, devices or strides the kernel does not support."""
    query, key, value = projected
    tokens, _, size = query.shape
    owners, value_size = key.shape[1], value.shape[2]
    for name, rows in (("query", query), ("key", key), ("value", value)):
        check_rows(name, rows)
    check_angles(query, *cos_sin)
    check_like("key", key, (tokens, owners, size), query.device)
    check_like("value", value, (tokens, owners, value_size), query.device)
    check_like("rows.slot_mapping", kept.slot_mapping, (tokens,), query.device)
    keys, values = (kept.fields[name] for name in ("key", "value"))
    for name, memory, given in (("key", keys, key), ("value", values, value)):
        check_like(f"rows.fields[{name!r}]", memory, (memory.shape[0], *given.shape[1:]), query.device)
        if memory.dtype != query.dtype or memory.stride(2) != 1:
            allowed = f"{query.dtype}, with a contiguous last axis"
            raise InvalidValue.of(f"rows.fields[{name!r}]", f"{memory.dtype}, strides {memory.stride()}", allowed)


def append_launch(
    projected: tuple[Tensor, Tensor, Tensor],
    cos_sin: tuple[Tensor, Tensor],
    kept: RowsInPlace,
    out: Tensor,
    *,
    interleaved: bool,
) -> Launch:
    """The launch of the kernel over all heads of queries, keys and values."""
    query, key, value = projected
    tokens, heads, _ = query.shape
    owners, value_size = key.shape[1], value.shape[2]
    keys, values = (kept.fields[name] for name in ("key", "value"))
    rotation = Rotation(by_sequence(cos_sin[0]), by_sequence(cos_sin[1]), interleaved)
    call = Append(
        query=located(query),
        key=located(key),
        value=located(value),
        out=located(out),
        key_memory=located(keys),
        value_memory=located(values),
        slots=kept.slot_mapping,
        angles=Angles(rotation.cosines, rotation.sines, 0, rotation.cosines.stride(1)),
        tokens=tokens,
        heads=heads,
        owners=owners,
        tile=rotary_tile(query[None], rotation)._replace(tokens=tl.constexpr(1)),
        value_size=tl.constexpr(value_size),
        value_width=tl.constexpr(power(value_size)),
    )
    return Launch(program=rotate_append, programs=tokens * (heads + 2 * owners), call=call, warps=1, stages=1)


def located(rows: Tensor) -> Rows:
    """The kernel argument for a tensor [row, head, size]: its data and strides."""
    return Rows(rows, 0, rows.stride(0), rows.stride(1))
