"""Products of rows with quantized weights, which are dequantized in registers before the matrix instructions."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.linear_fp8 import summed_e4m3
from attn_kernels_triton.kernels.rowwise import NO_MATRIX, Matrix, starts_of

HALF = tl.constexpr(16)
"""The number of inputs of a group of 32 that are stored in the lower four bits of its bytes; the others are in the
upper four bits."""


class QuantizedWeights(NamedTuple):
    """Quantized weights [outputs, inputs]: a weight is (code - zero) * step + least.

    `data` has `width` bytes per output: int8, or for 4 `bits` uint8 with inputs j and j + 16 of a group of 32 in a
    byte. `steps`, and `leasts` and `zeros` (or None), are [outputs, groups], with `group` inputs each; if `group` is
    None, an output has one step, [outputs], which multiplies its sum. `zero`, or None, is subtracted from all codes. If
    `e4m3` is set, codes are FP8 numbers, passed as int8 or, if the device supports it, as float8; `group` is then None
    or the number of inputs of a loop iteration.
    """

    data: Any
    width: Any
    steps: Any
    leasts: Any
    zeros: Any
    groups: Any
    bits: Any
    group: Any
    zero: Any
    e4m3: Any


class LinearTile(NamedTuple):
    """Compile-time constants: rows and outputs of a tile, and the inputs of a loop iteration."""

    rows: Any
    outputs: Any
    inputs: Any


class Product(NamedTuple):
    """The argument of both kernels: `rows` [row, inputs] and `out` [row, outputs] with `count` rows; `bias` [outputs]
    or None.

    The inputs are split into `splits` of `split_steps` loop iterations, whose sums are added in order. `parts` [splits,
    row, outputs], float32, holds the sums if each program takes one split; it is None if a program takes all. Rows in
    e4m3 have `scales` [row, 1], or [row, groups] for the groups of the weights.
    """

    rows: Matrix
    codes: QuantizedWeights
    bias: Any
    out: Matrix
    parts: Any
    count: Any
    inputs: Any
    outputs: Any
    split_steps: Any
    splits: Any
    tile: LinearTile
    scales: Matrix = NO_MATRIX


@triton.jit
def multiply_codes(call):
    """The matrix product. Grid: blocks of outputs, for each block of rows, for each split if there are `parts`."""
    across, down = tl.cdiv(call.outputs, call.tile.outputs), tl.cdiv(call.count, call.tile.rows)
    outputs = tl.program_id(0) % across * call.tile.outputs + tl.arange(0, call.tile.outputs)
    rows = tl.program_id(0) // across % down * call.tile.rows + tl.arange(0, call.tile.rows)
    if call.parts is None:
        total = tl.zeros([call.tile.outputs, call.tile.rows], tl.float32)
        for split in range(call.splits):
            total += summed(call, outputs, rows, split)
        finish(call, total, outputs, rows)
    else:
        split = tl.program_id(0) // across // down
        start = call.parts + (split.to(tl.int64) * call.count + rows[None, :]) * call.outputs
        inside = (outputs < call.outputs)[:, None] & (rows < call.count)[None, :]
        tl.store(start + outputs[:, None], summed(call, outputs, rows, split), mask=inside)


@triton.jit
def add_parts(call):
    """Add the partial sums of all splits in order. Grid: blocks of outputs, for each block of rows."""
    across = tl.cdiv(call.outputs, call.tile.outputs)
    outputs = tl.program_id(0) % across * call.tile.outputs + tl.arange(0, call.tile.outputs)
    rows = tl.program_id(0) // across * call.tile.rows + tl.arange(0, call.tile.rows)
    inside = (outputs < call.outputs)[:, None] & (rows < call.count)[None, :]
    total = tl.zeros([call.tile.outputs, call.tile.rows], tl.float32)
    start = call.parts + rows[None, :].to(tl.int64) * call.outputs + outputs[:, None]
    # Computed outside of the loop: Triton 3.6 loses integers of tuples inside loops.
    step = tl.cast(call.count, tl.int64) * call.outputs
    for split in range(call.splits):
        total += tl.load(start + split * step, mask=inside, other=0.0)
    finish(call, total, outputs, rows)


@triton.jit
def finish(call, total, outputs, rows):
    """Apply scales and bias to sums [output, row], and write them to the output."""
    known = outputs < call.outputs
    if call.codes.group is None:
        if call.scales.data is None:
            total *= tl.load(call.codes.steps + outputs, mask=known, other=0.0).to(tl.float32)[:, None]
        else:
            # The steps of the outputs have been applied in each loop iteration.
            total *= tl.load(starts_of(call.scales, rows), mask=rows < call.count, other=0.0)[None, :]
    if call.bias is not None:
        total += tl.load(call.bias + outputs, mask=known, other=0.0).to(tl.float32)[:, None]
    at = call.out.data + rows[None, :].to(tl.int64) * call.out.row + outputs[:, None]
    tl.store(at, total.to(call.out.data.dtype.element_ty), mask=known[:, None] & (rows < call.count)[None, :])


@triton.jit
def summed(call, outputs, rows, split):
    """The sums [output, row] over the inputs of one split."""
    return summed_e4m3(call, outputs, rows, split) if call.codes.e4m3 else summed_numbers(call, outputs, rows, split)


@triton.jit
def summed_numbers(call, outputs, rows, split):
    """Like `summed`, for integer codes."""
    # Triton 3.6 loses integers and constants of tuples inside loops: all that they need is computed before.
    step_inputs: tl.constexpr = call.tile.inputs
    halves: tl.constexpr = step_inputs // 2
    bits: tl.constexpr = call.codes.bits
    group: tl.constexpr = call.codes.group
    zero: tl.constexpr = call.codes.zero
    sums = tl.zeros([call.tile.outputs, call.tile.rows], tl.float32)
    source = call.rows.data + rows[:, None].to(tl.int64) * call.rows.row
    real, known = (rows < call.count)[:, None], (outputs < call.outputs)[:, None]
    data = call.codes.data + outputs[:, None].to(tl.int64) * call.codes.width
    inputs, width = call.inputs + 0, call.codes.width + 0
    stop = tl.minimum((split + 1) * call.split_steps, tl.cdiv(call.inputs, step_inputs))
    if group is not None:
        groups = call.codes.groups + 0
        first_group = outputs[:, None] * groups
    else:
        groups = 0
        first_group = outputs[:, None]
    scales = (call.codes.steps, call.codes.leasts, call.codes.zeros)
    for iteration in range(split * call.split_steps, stop):
        first = iteration * step_inputs
        where = (first, first_group, groups, known)
        if bits == 4:
            places = tl.arange(0, halves)
            byte = (first // 2 + places)[None, :]
            found = tl.load(data + byte, mask=known & (byte < width), other=0)
            column = (first + places // HALF * (2 * HALF) + places % HALF)[None, :]
            lower = tl.load(source + column, mask=real & (column < inputs), other=0.0)
            upper = tl.load(source + HALF + column, mask=real & (column + HALF < inputs), other=0.0)
            weights = numbers(scales, found & 15, where, group, HALF, zero)
            sums = tl.dot(weights.to(lower.dtype), tl.trans(lower), sums)
            weights = numbers(scales, found >> 4, where, group, HALF, zero)
            sums = tl.dot(weights.to(upper.dtype), tl.trans(upper), sums)
        else:
            column = first + tl.arange(0, step_inputs)[None, :]
            found = tl.load(data + column, mask=known & (column < width), other=0)
            taken = tl.load(source + column, mask=real & (column < inputs), other=0.0)
            weights = numbers(scales, found, where, group, group, zero)
            sums = tl.dot(weights.to(taken.dtype), tl.trans(taken), sums)
    return sums


@triton.jit
def numbers(scales, found, where, group: tl.constexpr, each: tl.constexpr, zero: tl.constexpr):
    """Dequantize codes [output, input], except for per-output steps; `each` neighbouring columns share a group."""
    steps, leasts, zeros = scales
    first, first_group, groups, known = where
    weights = found.to(tl.float32)
    if group is not None:
        count: tl.constexpr = found.shape[1] // each
        shape: tl.constexpr = found.shape
        group_of = (first // group + tl.arange(0, count))[None, :]
        at, inside = first_group + group_of, known & (group_of < groups)
        if zeros is not None:
            weights -= spread(tl.load(zeros + at, mask=inside, other=0), each, shape)
        if zero is not None:
            weights -= zero
        weights *= spread(tl.load(steps + at, mask=inside, other=0.0), each, shape)
        if leasts is not None:
            weights += spread(tl.load(leasts + at, mask=inside, other=0.0), each, shape)
    return weights


@triton.jit
def spread(values, each: tl.constexpr, shape: tl.constexpr):
    """Expand values [output, group] to float32 [output, input], each repeated `each` times."""
    wide = tl.broadcast_to(values.to(tl.float32)[:, :, None], [values.shape[0], values.shape[1], each])
    return tl.reshape(wide, shape)
