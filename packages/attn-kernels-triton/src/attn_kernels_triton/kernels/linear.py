"""Products of rows with weights of few bits, which become numbers in registers, on their way to the matrix unit."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.linear_fp8 import summed_e4m3
from attn_kernels_triton.kernels.rowwise import NO_MATRIX, Matrix, starts_of

HALF = tl.constexpr(16)
"""Inputs of a group of 32 that have the lower four bits of its bytes; the others have the upper ones."""


class Codes(NamedTuple):
    """Weights [outputs, inputs] as whole numbers: a weight is (code - zero) * step + least.

    `data` has `width` bytes for each output: int8, or of 4 `bits` uint8 with input j and input j + 16 of 32 in a byte.
    `steps`, and `leasts` and `zeros` or None, are [outputs, groups], each of `group` inputs; where that is None an
    output has one step, [outputs], by which its sum is multiplied. `zero` or None is what all codes have subtracted.
    Where `e4m3` says so, codes are not whole numbers but floats of 8 bits, as int8 or, where rows are such codes, as
    what they are; `group` is then None or that of a turn of the loop.
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
    """Rows and outputs of a program, and the inputs of a turn of its loop."""

    rows: Any
    outputs: Any
    inputs: Any


class Product(NamedTuple):
    """Everything for both programs: `rows` [row, inputs], `out` [row, outputs], so many in `count`; `bias` [outputs] or
    None.

    Sums are taken over `share` turns of the loop at a time, `shares` times, and added one after another. `parts`
    [shares, row, outputs], float32, keeps those of programs that take one each; None where a program takes all.
    Rows of e4m3 have `scales` [row, 1], or [row, groups] of the weights' groups.
    """

    rows: Matrix
    codes: Codes
    bias: Any
    out: Matrix
    parts: Any
    count: Any
    inputs: Any
    outputs: Any
    share: Any
    shares: Any
    tile: LinearTile
    scales: Matrix = NO_MATRIX


@triton.jit
def multiply_codes(call):
    """Grid: blocks of outputs, for each block of rows, for each share where there are `parts`."""
    across, down = tl.cdiv(call.outputs, call.tile.outputs), tl.cdiv(call.count, call.tile.rows)
    outputs = tl.program_id(0) % across * call.tile.outputs + tl.arange(0, call.tile.outputs)
    rows = tl.program_id(0) // across % down * call.tile.rows + tl.arange(0, call.tile.rows)
    if call.parts is None:
        total = tl.zeros([call.tile.outputs, call.tile.rows], tl.float32)
        for share in range(call.shares):
            total += summed(call, outputs, rows, share)
        finish(call, total, outputs, rows)
    else:
        share = tl.program_id(0) // across // down
        start = call.parts + (share.to(tl.int64) * call.count + rows[None, :]) * call.outputs
        inside = (outputs < call.outputs)[:, None] & (rows < call.count)[None, :]
        tl.store(start + outputs[:, None], summed(call, outputs, rows, share), mask=inside)


@triton.jit
def add_parts(call):
    """Grid: blocks of outputs, for each block of rows; adds the shares in their order."""
    across = tl.cdiv(call.outputs, call.tile.outputs)
    outputs = tl.program_id(0) % across * call.tile.outputs + tl.arange(0, call.tile.outputs)
    rows = tl.program_id(0) // across * call.tile.rows + tl.arange(0, call.tile.rows)
    inside = (outputs < call.outputs)[:, None] & (rows < call.count)[None, :]
    total = tl.zeros([call.tile.outputs, call.tile.rows], tl.float32)
    start = call.parts + rows[None, :].to(tl.int64) * call.outputs + outputs[:, None]
    # Triton 3.6 loses numbers of tuples inside of loops.
    step = tl.cast(call.count, tl.int64) * call.outputs
    for share in range(call.shares):
        total += tl.load(start + share * step, mask=inside, other=0.0)
    finish(call, total, outputs, rows)


@triton.jit
def finish(call, total, outputs, rows):
    """Write sums [output, row]."""
    known = outputs < call.outputs
    if call.codes.group is None:
        if call.scales.data is None:
            total *= tl.load(call.codes.steps + outputs, mask=known, other=0.0).to(tl.float32)[:, None]
        else:
            # Steps of outputs are in the sums of each turn.
            total *= tl.load(starts_of(call.scales, rows), mask=rows < call.count, other=0.0)[None, :]
    if call.bias is not None:
        total += tl.load(call.bias + outputs, mask=known, other=0.0).to(tl.float32)[:, None]
    at = call.out.data + rows[None, :].to(tl.int64) * call.out.row + outputs[:, None]
    tl.store(at, total.to(call.out.data.dtype.element_ty), mask=known[:, None] & (rows < call.count)[None, :])


@triton.jit
def summed(call, outputs, rows, share):
    """The sums [output, row] over the inputs of one share."""
    return summed_e4m3(call, outputs, rows, share) if call.codes.e4m3 else summed_numbers(call, outputs, rows, share)


@triton.jit
def summed_numbers(call, outputs, rows, share):
    """As `summed`, of weights that are whole numbers."""
    # Triton 3.6 loses numbers and constants of tuples inside of loops: all that they need is made before.
    turn_inputs: tl.constexpr = call.tile.inputs
    halves: tl.constexpr = turn_inputs // 2
    bits: tl.constexpr = call.codes.bits
    group: tl.constexpr = call.codes.group
    zero: tl.constexpr = call.codes.zero
    sums = tl.zeros([call.tile.outputs, call.tile.rows], tl.float32)
    source = call.rows.data + rows[:, None].to(tl.int64) * call.rows.row
    real, known = (rows < call.count)[:, None], (outputs < call.outputs)[:, None]
    data = call.codes.data + outputs[:, None].to(tl.int64) * call.codes.width
    inputs, width = call.inputs + 0, call.codes.width + 0
    stop = tl.minimum((share + 1) * call.share, tl.cdiv(call.inputs, turn_inputs))
    if group is not None:
        groups = call.codes.groups + 0
        first_group = outputs[:, None] * groups
    else:
        groups = 0
        first_group = outputs[:, None]
    scales = (call.codes.steps, call.codes.leasts, call.codes.zeros)
    for turn in range(share * call.share, stop):
        first = turn * turn_inputs
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
            column = first + tl.arange(0, turn_inputs)[None, :]
            found = tl.load(data + column, mask=known & (column < width), other=0)
            taken = tl.load(source + column, mask=real & (column < inputs), other=0.0)
            weights = numbers(scales, found, where, group, group, zero)
            sums = tl.dot(weights.to(taken.dtype), tl.trans(taken), sums)
    return sums


@triton.jit
def numbers(scales, found, where, group: tl.constexpr, each: tl.constexpr, zero: tl.constexpr):
    """What codes [output, input] mean, but for steps of whole outputs; `each` in a row of them share a group."""
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
    """Numbers [output, group] in float32 for every code [output, input]."""
    wide = tl.broadcast_to(values.to(tl.float32)[:, :, None], [values.shape[0], values.shape[1], each])
    return tl.reshape(wide, shape)
