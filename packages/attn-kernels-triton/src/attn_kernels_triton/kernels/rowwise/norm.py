"""Root mean square norms of rows, or of sums of two: forward, and all gradients in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.rowwise.rows import read_tile, write_tile


@triton.jit
def norm_rows(call):
    """Norm some rows. Grid: blocks of rows."""
    rows = tl.program_id(0) * call.tile.rows + tl.arange(0, call.tile.rows)
    columns = tl.arange(0, call.tile.width)
    row = read_tile(call.rows, rows, call.count, columns, call.tile.size)
    if call.added.data is not None:
        row += read_tile(call.added, rows, call.count, columns, call.tile.size)
        # What is normed is what others read: the sum as it was rounded.
        row = row.to(call.total.data.dtype.element_ty)
        write_tile(call.total, rows, call.count, columns, call.tile.size, row)
        row = row.to(tl.float32)
    out = row * tl.rsqrt(tl.sum(row * row, 1) / call.tile.size + call.eps)[:, None]
    if call.gain is not None:
        out *= gain_of(call.gain, columns, call.tile.size)[None, :]
    write_tile(call.out, rows, call.count, columns, call.tile.size, out)


@triton.jit
def unnorm_rows(call):
    """Gradients to rows, and what these rows add to that to the gain. Grid: programs, which share the blocks of rows.

    With x̂ = x / rms(x) and h = g ⊙ dy:   dx = (h - x̂ mean(h x̂)) / rms(x),   dg = Σ dy ⊙ x̂
    """
    columns = tl.arange(0, call.tile.width)
    gains = tl.zeros([call.tile.width], tl.float32)
    count, programs, eps = call.count + 0, call.programs + 0, call.eps
    for block in range(tl.program_id(0), tl.cdiv(count, call.tile.rows), programs):
        rows = block * call.tile.rows + tl.arange(0, call.tile.rows)
        row = read_tile(call.rows, rows, count, columns, call.tile.size)
        change = read_tile(call.out, rows, count, columns, call.tile.size)
        scale = tl.rsqrt(tl.sum(row * row, 1) / call.tile.size + eps)[:, None]
        row *= scale
        if call.gain is not None:
            gains += tl.sum(change * row, 0)
            change *= gain_of(call.gain, columns, call.tile.size)[None, :]
        change = scale * (change - row * (tl.sum(change * row, 1) / call.tile.size)[:, None])
        if call.total.data is not None:
            change += read_tile(call.total, rows, count, columns, call.tile.size)
        write_tile(call.change, rows, count, columns, call.tile.size, change)
    if call.gains.data is not None:
        at = call.gains.data + tl.program_id(0) * call.tile.size + columns
        tl.store(at, gains, mask=columns < call.tile.size)


@triton.jit
def gain_of(gain, columns, size: tl.constexpr):
    """The gain of some columns in float32."""
    return tl.load(gain + columns, mask=columns < size, other=0.0).to(tl.float32)
