"""Rows as e4m3 codes with a scale for each block of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attn_kernels_triton.fp8.rotation import rotation
from attn_kernels_triton.kernels.fp8 import BLOCK, make_codes
from attn_kernels_triton.kernels.fp8_arguments import Codes
from attn_kernels_triton.launch import Launch, power_of_two, rows

ROWS: int = BLOCK.value
"""Rows that share a scale."""
LEAST_WIDTH = 32
"""Codes that the matrix unit sums over at once."""


class Coded(NamedTuple):
    """Codes [batch, head, row, width], of values [batch, head, width, row], and scales [batch, head, block]."""

    codes: Tensor
    scales: Tensor


def width_of(size: int) -> int:
    """The size of a head in codes."""
    return max(LEAST_WIDTH, power_of_two(size))


def blocks_of(count: int) -> int:
    """Blocks of so many rows."""
    return -(-count // ROWS)


def empty_codes(given: Tensor, *, turned: bool) -> Coded:
    """Where the codes of rows [batch, row, head, size] are written."""
    batch, count, heads, size = given.shape
    held = [blocks_of(count) * ROWS, width_of(size)]
    codes = given.new_empty(batch, heads, *(held[::-1] if turned else held), dtype=torch.float8_e4m3fn)
    return Coded(codes, given.new_empty(batch, heads, blocks_of(count), dtype=torch.float32))


def codes_launch(given: Tensor, into: Coded, *, turned: bool, rotated: bool) -> Launch:
    """The program that rounds rows, first rotated where that is wanted, into codes."""
    batch, count, heads, size = given.shape
    width = width_of(size)
    call = Codes(
        rows=rows(given),
        count=count,
        heads=heads,
        rotation=rotation(width, given.dtype, given.device) if rotated else None,
        codes=into.codes,
        scales=into.scales,
        size=tl.constexpr(size),
        width=tl.constexpr(width),
        turned=tl.constexpr(turned),
    )
    return Launch(program=make_codes, programs=batch * heads * blocks_of(count), call=call, warps=8, stages=1)
