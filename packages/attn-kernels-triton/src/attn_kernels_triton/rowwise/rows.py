"""Checks, tile sizes and kernel arguments that the row-wise operations share."""

from __future__ import annotations

import torch
import triton.language as tl
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_kernels_triton.checks import DTYPES, check_count, check_like
from attn_kernels_triton.kernels.rowwise import NO_MATRIX, Matrix, RowTile
from attn_kernels_triton.machine import interpreted

VOCABULARY_WIDEST = 2**31 - 2**16
"""The longest row whose last tile still has 32-bit offsets."""


def check_rows(name: str, rows: Tensor, widest: int = VOCABULARY_WIDEST) -> None:
    """Raise `InvalidValue` unless rows [..., width] are on a GPU, of a supported dtype and width, and contiguous along
    the last axis."""
    if rows.dim() < 1 or not 1 <= rows.shape[-1] <= widest:
        raise InvalidValue.of(name, list(rows.shape), f"rows of 1 to {widest} elements")
    if rows.device.type != "cuda" and not interpreted():
        raise InvalidValue.of(f"{name}.device", str(rows.device), "a GPU: these kernels do not run on a CPU")
    if rows.dtype not in DTYPES:
        raise InvalidValue.of(f"{name}.dtype", str(rows.dtype), "float32, bfloat16 or float16")
    check_dense(name, rows)
    check_count(f"{name}: rows", rows.numel() // rows.shape[-1])


def check_same(name: str, tensor: Tensor, rows: Tensor) -> None:
    """Raise `InvalidValue` unless a tensor has the shape, dtype and device of the rows."""
    check_like(name, tensor, tuple(rows.shape), rows.device)
    if tensor.dtype != rows.dtype:
        raise InvalidValue.of(f"{name}.dtype", str(tensor.dtype), f"{rows.dtype}, as the rows")
    check_dense(name, tensor)


def check_added(added: Tensor, rows: Tensor) -> None:
    """Raise `InvalidValue` unless `added` has the shape and device of the rows, and their dtype or one that promotes to
    it: float32 rows plus bfloat16 are float32."""
    if added.is_floating_point() and torch.promote_types(rows.dtype, added.dtype) is rows.dtype:
        check_like("added", added, tuple(rows.shape), rows.device)
        check_dense("added", added)
    else:
        check_same("added", added, rows)


def check_gain(gain: Tensor | None, rows: Tensor) -> None:
    """Raise `InvalidValue` unless `gain` is None or a contiguous factor [size] of any supported dtype."""
    if gain is None:
        return
    check_like("gain", gain, tuple(rows.shape[-1:]), rows.device)
    if gain.dtype not in DTYPES:
        raise InvalidValue.of("gain.dtype", str(gain.dtype), "float32, bfloat16 or float16")
    check_dense("gain", gain)


def check_angles(rows: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Raise `InvalidValue` for cosines and sines that do not fit rows [tokens, heads, size] or [batch, tokens, heads,
    size]."""
    if rows.dim() not in (3, 4):
        raise InvalidValue.of("rows", list(rows.shape), "three or four axes: batch, tokens, heads, size")
    batch, tokens, _, size = (1, *rows.shape)[-4:]
    for name, table in (("cosines", cosines), ("sines", sines)):
        shape = tuple(table.shape)
        fits = [(tokens, 1), (1, tokens, 1), (batch, tokens, 1)]
        if shape[:-1] not in fits or not 2 <= shape[-1] <= size or shape[-1] % 2 or shape != tuple(cosines.shape):
            raise InvalidValue.of(
                name, list(shape), f"[{tokens}, 1, an even number up to {size}], the shape of the cosines"
            )
        if table.dtype != torch.float32 or table.device != rows.device:
            raise InvalidValue.of(name, f"{table.dtype} on {table.device}", f"float32 on {rows.device}")
        if table.requires_grad:
            raise InvalidValue.of(f"{name}.requires_grad", "True", "False: angles have no gradient")
        check_dense(name, table)
    check_count("tokens of a sequence", tokens * rows.stride(-3))


def check_logits(logits: Tensor, ids: Tensor) -> None:
    """Raise `InvalidValue` unless logits are [row, vocabulary], with rows that do not overlap, and ids int64 [row]."""
    if logits.dim() != 2:
        raise InvalidValue.of("logits", list(logits.shape), "two axes: row, vocabulary")
    check_rows("logits", logits)
    check_like("ids", ids, (logits.shape[0],), logits.device)
    if ids.dtype != torch.int64:
        raise InvalidValue.of("ids.dtype", str(ids.dtype), "int64")
    if logits.stride(0) < logits.shape[1] and logits.shape[0] > 1:
        raise InvalidValue.of("logits.stride", list(logits.stride()), "rows that do not overlap: they are overwritten")


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise `InvalidValue` unless the last axis is contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise InvalidValue.of(f"{name}.stride", list(tensor.stride()), "one that ends in 1 (a contiguous last axis)")


NORM_ELEMENTS = 2048
"""The number of elements of a norm's tile where rows are short."""
WARPS_OF_WIDTH = {2048: 4, 4096: 8, 8192: 16}
"""The number of warps of a norm kernel for rows of up to each width."""
BACKWARD_WARPS = 132 * 32
"""The number of warps of a whole backward norm, enough to keep an H200 busy."""
GATE_ELEMENTS, GATE_WIDTH = 4096, 1024
LOSS_WIDTH, LOSS_WARPS = 8192, 8
ROTARY_PAIRS, ROTARY_HEADS = 1024, 4
"""The number of pairs in a tile of tokens, and of heads that a program rotates one after the other."""


def power(size: int) -> int:
    """The least power of two that is not smaller than `size`."""
    return 1 << (size - 1).bit_length()


def norm_tile(size: int) -> tuple[RowTile, int]:
    """The tile of a norm kernel, of as many whole rows as fit, and its number of warps."""
    width = power(size)
    warps = next(warps for widest, warps in WARPS_OF_WIDTH.items() if width <= widest)
    return tile(max(1, NORM_ELEMENTS // width), size, width), warps


def gate_tile(size: int) -> RowTile:
    """The tile of a gate kernel, of parts of rows."""
    width = min(GATE_WIDTH, power(size))
    return tile(GATE_ELEMENTS // width, size, width)


def loss_tile(size: int) -> RowTile:
    """The tile of the cross-entropy kernel: one row, part by part."""
    return tile(1, size, min(LOSS_WIDTH, power(size)))


def tile(rows: int, size: int, width: int) -> RowTile:
    """The compile-time constants of a tile: its rows, the size of a row and the width."""
    return RowTile(tl.constexpr(rows), tl.constexpr(size), tl.constexpr(width))


def matrix(tensor: Tensor | None) -> Matrix:
    """The kernel argument for a tensor [row, size]; `NO_MATRIX` for None."""
    return NO_MATRIX if tensor is None else Matrix(tensor, tensor.stride(0))


def flat(tensor: Tensor) -> Tensor:
    """Flatten a tensor [..., size] to [row, size]; it is copied if rows are not evenly spaced or not contiguous."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
