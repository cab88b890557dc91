"""How much the programs on rows take at once."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from attn_kernels_triton.kernels.rowwise.arguments import NO_MATRIX, Matrix, RowTile

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
