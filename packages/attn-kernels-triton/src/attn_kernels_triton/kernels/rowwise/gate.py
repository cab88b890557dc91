"""f(gate) ⊙ up, and its gradients with f computed again."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.rowwise.rows import read_tile, write_tile

SQRT_HALF = tl.constexpr(0.7071067811865476)
NORMAL = tl.constexpr(0.3989422804014327)
"""1 / √(2π), the height of the normal density."""
STEEP, CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)
"""Of (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, written as a logistic function of twice the argument."""


@triton.jit
def gate_rows(call):
    """Write the output. Grid: parts of rows of blocks of rows."""
    rows, columns = place_of(call)
    gate = read_tile(call.gate, rows, call.count, columns, call.tile.size)
    up = read_tile(call.up, rows, call.count, columns, call.tile.size)
    share, _ = share_of(gate, call.activation)
    write_tile(call.out, rows, call.count, columns, call.tile.size, gate * share * up)


@triton.jit
def ungate_rows(call):
    """Write the gradients. Grid: parts of rows of blocks of rows."""
    rows, columns = place_of(call)
    gate = read_tile(call.gate, rows, call.count, columns, call.tile.size)
    up = read_tile(call.up, rows, call.count, columns, call.tile.size)
    change = read_tile(call.change, rows, call.count, columns, call.tile.size)
    share, slope = share_of(gate, call.activation)
    write_tile(call.first, rows, call.count, columns, call.tile.size, change * up * (share + gate * slope))
    write_tile(call.second, rows, call.count, columns, call.tile.size, change * gate * share)


@triton.jit
def place_of(call):
    """Rows and columns of this program."""
    parts: tl.constexpr = (call.tile.size + call.tile.width - 1) // call.tile.width
    rows = tl.program_id(0) // parts * call.tile.rows + tl.arange(0, call.tile.rows)
    return rows, tl.program_id(0) % parts * call.tile.width + tl.arange(0, call.tile.width)


@triton.jit
def share_of(gate, activation: tl.constexpr):
    """s(x) of an activation x s(x), and s'(x)."""
    if activation == "gelu":
        share = 0.5 * (1 + tl.erf(gate * SQRT_HALF))
        slope = tl.exp(gate * gate * -0.5) * NORMAL
    else:
        at, steep = gate, 1.0
        if activation == "gelu_tanh":
            at = (gate + gate * gate * gate * CUBIC) * STEEP
            steep = (1 + gate * gate * CUBIC * 3) * STEEP
        share = tl.sigmoid(at)
        # As σ(-x): where σ(x) is nearly 1, one minus it has few digits.
        slope = share * tl.sigmoid(-at) * steep
    return share, slope
