"""What keys of a chunk already say to one another, for the delta rule (Yang et al. 2024, arXiv 2406.06484, §3.2).

With the products B of keys below the diagonal, E = V - k̃ S - B β E, so E = X - Y S with X = T V, Y = T k̃ and T =
(I + B β)^-1 = I - B (I + β B)^-1 β. The inverse is kept for the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.scan.pairs import pairs
from attn_kernels_triton.kernels.scan.rows import early, place, product, read_part, read_strength, write_part


@triton.jit
def correct(scan):
    """Grid: chunks of heads."""
    chunk, _, batch, head = place(scan, 1)
    who = (batch, head)
    index = tl.arange(0, scan.tile.chunk)
    rows = chunk * scan.tile.chunk + index
    same = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    products = tl.where(index[:, None] > index[None, :], pairs(scan, scan.key, scan.key, who, chunk), 0.0)
    strength = read_strength(scan, who, rows)
    inverse = inverted(scan, strength[:, None] * products)
    write_part(scan.inverse, who, rows, scan.tokens, index, scan.tile.chunk, inverse)
    solving = same - solving_product(scan, products, inverse * strength[None, :])
    solving = solving.to(scan.key.data.dtype.element_ty)
    for first in range(0, scan.tile.key_width, scan.tile.keys_at_once):
        columns = first + tl.arange(0, scan.tile.keys_at_once)
        key = read_part(scan.key, who, rows, scan.tokens, columns, scan.tile.key_size)
        told = product(scan.tile.split, solving, early(scan, key, who, rows, columns))
        write_part(scan.told, who, rows, scan.tokens, columns, scan.tile.key_size, told)
    for first in range(0, scan.tile.value_size, scan.tile.values_at_once):
        columns = first + tl.arange(0, scan.tile.values_at_once)
        value = read_part(scan.value, who, rows, scan.tokens, columns, scan.tile.value_size)
        solved = product(scan.tile.split, solving, value)
        write_part(scan.solved, who, rows, scan.tokens, columns, scan.tile.value_size, solved)


@triton.jit
def inverted(scan, lower):
    """(I + L)^-1 of a strictly lower triangular L [C, C], by halves: ((A, 0), (B, D))^-1 from those of A and D."""
    index = tl.arange(0, scan.tile.chunk)
    found = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    for turn in range(scan.tile.rounds):
        half = 1 << turn
        same = index[:, None] // (2 * half) == index[None, :] // (2 * half)
        across = same & (index[:, None] // half % 2 == 1) & (index[None, :] // half % 2 == 0)
        block = solving_product(scan, found, tl.where(across, lower, 0.0))
        found -= solving_product(scan, block, found)
    return found


@triton.jit
def solving_product(scan, one, other):
    """A product of float32 matrices; where keys have 16 bits, those of TF32, which are more, are enough."""
    if scan.tile.split and scan.key.data.dtype.element_ty != tl.float32:
        found = tl.dot(one, other, input_precision="tf32")
    else:
        found = product(scan.tile.split, one, other)
    return found
