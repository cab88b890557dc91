"""Checks, tiles and views that the row-wise operations share."""

from __future__ import annotations

import torch
import triton.language as tl
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_kernels_triton.checks import DTYPES, check_count, check_like
from attn_kernels_triton.kernels.rowwise import NO_MATRIX, Matrix, RowTile
from attn_kernels_triton.machine import interpreted

VOCABULARY_WIDEST = 2**31 - 2**16
"""Ids up to which the last tile of a row is counted in 32 bits."""


def check_rows(name: str, rows: Tensor, widest: int = VOCABULARY_WIDEST) -> None:
    """Rows [..., width] on a GPU, of a type and width that the programs take, dense along their last axis."""
    if rows.dim() < 1 or not 1 <= rows.shape[-1] <= widest:
        raise InvalidValue.of(name, list(rows.shape), f"rows of 1 to {widest} elements")
    if rows.device.type != "cuda" and not interpreted():
        raise InvalidValue.of(f"{name}.device", str(rows.device), "a GPU: these kernels do not run on a CPU")
    if rows.dtype not in DTYPES:
        raise InvalidValue.of(f"{name}.dtype", str(rows.dtype), "float32, bfloat16 or float16")
    check_dense(name, rows)
    check_count(f"{name}: rows", rows.numel() // rows.shape[-1])


def check_same(name: str, tensor: Tensor, rows: Tensor) -> None:
    """A tensor just like the rows in shape, type and device."""
    check_like(name, tensor, tuple(rows.shape), rows.device)
    if tensor.dtype != rows.dtype:
        raise InvalidValue.of(f"{name}.dtype", str(tensor.dtype), f"{rows.dtype}, as the rows")
    check_dense(name, tensor)


def check_added(added: Tensor, rows: Tensor) -> None:
    """A tensor of the rows' shape and device, of their type or one whose numbers it holds: float32 rows plus bfloat16
    are float32."""
    if added.is_floating_point() and torch.promote_types(rows.dtype, added.dtype) is rows.dtype:
        check_like("added", added, tuple(rows.shape), rows.device)
        check_dense("added", added)
    else:
        check_same("added", added, rows)


def check_gain(gain: Tensor | None, rows: Tensor) -> None:
    """A factor for each element of a row, of any type that the programs take."""
    if gain is None:
        return
    check_like("gain", gain, tuple(rows.shape[-1:]), rows.device)
    if gain.dtype not in DTYPES:
        raise InvalidValue.of("gain.dtype", str(gain.dtype), "float32, bfloat16 or float16")
    check_dense("gain", gain)


def check_turns(rows: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Cosines and sines for rows [..., tokens, heads, size], of at most four axes."""
    if rows.dim() not in (3, 4):
        raise InvalidValue.of("rows", list(rows.shape), "three or four axes: batch, tokens, heads, size")
    batch, tokens, _, size = (1, *rows.shape)[-4:]
    for name, turn in (("cosines", cosines), ("sines", sines)):
        shape = tuple(turn.shape)
        fits = [(tokens, 1), (1, tokens, 1), (batch, tokens, 1)]
        if shape[:-1] not in fits or not 2 <= shape[-1] <= size or shape[-1] % 2 or shape != tuple(cosines.shape):
            raise InvalidValue.of(name, list(shape), f"[{tokens}, 1, an even number up to {size}], as the cosines")
        if turn.dtype != torch.float32 or turn.device != rows.device:
            raise InvalidValue.of(name, f"{turn.dtype} on {turn.device}", f"float32 on {rows.device}")
        if turn.requires_grad:
            raise InvalidValue.of(f"{name}.requires_grad", "True", "False: no gradient flows to angles")
        check_dense(name, turn)
    check_count("tokens of a sequence", tokens * rows.stride(-3))


def check_logits(logits: Tensor, ids: Tensor) -> None:
    """Logits [row, vocabulary] that may be overwritten, and an id for each row."""
    if logits.dim() != 2:
        raise InvalidValue.of("logits", list(logits.shape), "two axes: row, vocabulary")
    check_rows("logits", logits)
    check_like("ids", ids, (logits.shape[0],), logits.device)
    if ids.dtype != torch.int64:
        raise InvalidValue.of("ids.dtype", str(ids.dtype), "int64")
    if logits.stride(0) < logits.shape[1] and logits.shape[0] > 1:
        raise InvalidValue.of("logits.stride", list(logits.stride()), "rows that do not overlap: they are overwritten")


def check_dense(name: str, tensor: Tensor) -> None:
    """The last axis lies dense in memory."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise InvalidValue.of(f"{name}.stride", list(tensor.stride()), "one that ends in 1: rows lie dense in memory")


NORM_ELEMENTS = 2048
"""Elements of a tile of a norm where rows are short."""
WARPS_OF_WIDTH = {2048: 4, 4096: 8, 8192: 16}
"""Warps of the program of a norm up to each width."""
SHARES = 132 * 32
"""Warps of all programs that share the blocks of rows of a backward norm: as many as keep an H200 busy."""
GATE_ELEMENTS, GATE_WIDTH = 4096, 1024
LOSS_WIDTH, LOSS_WARPS = 8192, 8
TURN_ELEMENTS, TURN_HEADS = 1024, 4
"""Pairs of a tile of tokens, and heads that a program turns one after the other."""


def power(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def norm_tile(size: int) -> tuple[RowTile, int]:
    """Whole rows, as many as fit, and warps."""
    width = power(size)
    warps = next(warps for widest, warps in WARPS_OF_WIDTH.items() if width <= widest)
    return tile(max(1, NORM_ELEMENTS // width), size, width), warps


def gate_tile(size: int) -> RowTile:
    """Parts of rows."""
    width = min(GATE_WIDTH, power(size))
    return tile(GATE_ELEMENTS // width, size, width)


def loss_tile(size: int) -> RowTile:
    """One row, part by part."""
    return tile(1, size, min(LOSS_WIDTH, power(size)))


def tile(rows: int, size: int, width: int) -> RowTile:
    """The constants."""
    return RowTile(tl.constexpr(rows), tl.constexpr(size), tl.constexpr(width))


def matrix(tensor: Tensor | None) -> Matrix:
    """The view of a tensor [row, size], `NO_MATRIX` for None."""
    return NO_MATRIX if tensor is None else Matrix(tensor, tensor.stride(0))


def flat(tensor: Tensor) -> Tensor:
    """Rows [row, size] of [..., size]; copied where they are not evenly spaced, or not dense."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
