"""Products of rows with weights in FP8 (e4m3), and the programs that round rows to it (arXiv 2209.05433)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.rowwise import Matrix, RowTile, starts_of

LARGEST = tl.constexpr(448.0)
"""The largest number of e4m3, which has no infinity."""
LEAST = tl.constexpr(1.1754943508222875e-38)
"""The smallest scale: the smallest normal number of float32, so that rows of zeros and of smaller numbers divide."""
KEPT = tl.constexpr(-0x78100000)
"""Of a code in bits 20 to 27, its sign in all above: the sign as that of float32, and the other seven bits."""
LIFT = tl.constexpr(2.0**120)
"""What such bits are to be multiplied by: exponents of float32 are 120 more than those of e4m3."""


class RoundedRows(NamedTuple):
    """Everything for the programs that round `rows` [row, inputs], so many in `count`, to `codes` [row, inputs], e4m3,
    with `scales` [row, group], float32; `groups` of each row, 1 where all inputs share a scale.

    The `tile` has the inputs that are taken at once as its width; its `size`, a constant, is that of a group, or None.
    """

    rows: Matrix
    codes: Matrix
    scales: Matrix
    inputs: Any
    groups: Any
    tile: RowTile


@triton.jit
def round_rows(call):
    """Grid: rows. One scale for each row: its largest number becomes that of e4m3."""
    row = tl.program_id(0)
    source, into = starts_of(call.rows, row), starts_of(call.codes, row)
    # Triton 3.6 loses numbers and constants of tuples inside of loops.
    width: tl.constexpr = call.tile.width
    inputs, columns = call.inputs + 0, tl.arange(0, width)
    highest = tl.zeros([width], tl.float32)
    for first in range(0, inputs, width):
        found = tl.load(source + first + columns, mask=first + columns < inputs, other=0.0)
        highest = tl.maximum(highest, tl.abs(found.to(tl.float32)))
    scale = scale_of(tl.max(highest, 0))
    for first in range(0, inputs, width):
        found = tl.load(source + first + columns, mask=first + columns < inputs, other=0.0)
        tl.store(into + first + columns, code_of(found.to(tl.float32), scale), mask=first + columns < inputs)
    tl.store(starts_of(call.scales, row), scale)


@triton.jit
def round_groups(call):
    """Grid: rows. A scale for each group of neighbouring inputs of a row."""
    row = tl.program_id(0)
    source, into, scales = starts_of(call.rows, row), starts_of(call.codes, row), starts_of(call.scales, row)
    group: tl.constexpr = call.tile.size
    count: tl.constexpr = call.tile.width // group
    inputs, groups = call.inputs + 0, call.groups + 0
    columns = tl.arange(0, count)[:, None] * group + tl.arange(0, group)[None, :]
    for first in range(0, inputs, count * group):
        inside = first + columns < inputs
        found = tl.load(source + first + columns, mask=inside, other=0.0).to(tl.float32)
        scale = scale_of(tl.max(tl.abs(found), 1))
        tl.store(into + first + columns, code_of(found, scale[:, None]), mask=inside)
        place = first // group + tl.arange(0, count)
        tl.store(scales + place, scale, mask=place < groups)


@triton.jit
def scale_of(highest):
    """The scale of numbers of which this is the largest: infinite where that is."""
    return tl.where(highest > LARGEST * LEAST, tl.div_rn(highest, LARGEST), LEAST)


@triton.jit
def code_of(found, scale):
    """The nearest numbers of e4m3, times a scale, to float32: NaN stays NaN, and infinity is the largest one times an
    infinite scale. Comparisons let NaN pass, where minima and maxima drop it."""
    infinite = tl.abs(found) == float("inf")
    share = tl.where(infinite, tl.where(found > 0.0, LARGEST, -LARGEST), tl.div_rn(found, scale))
    share = tl.where(share > LARGEST, LARGEST, share)
    return tl.where(share < -LARGEST, -LARGEST, share).to(tl.float8e4nv)


@triton.jit
def summed_e4m3(call, outputs, rows, share):
    """The sums [output, row] over the inputs of one share.

    Where rows are codes, too, the matrix unit multiplies codes. It adds them up with fewer digits than float32 has (14
    bits on Hopper, arXiv 2412.19437, section 3.3.2), so that the sums of each turn are added in float32.
    """
    # Triton 3.6 loses numbers and constants of tuples inside of loops: all that they need is made before.
    turn_inputs: tl.constexpr = call.tile.inputs
    half: tl.constexpr = turn_inputs // 2
    group: tl.constexpr = call.codes.group
    coded: tl.constexpr = call.scales.data is not None
    sums = tl.zeros([call.tile.outputs, call.tile.rows], tl.float32)
    source = call.rows.data + rows[:, None].to(tl.int64) * call.rows.row
    real, known = (rows < call.count)[:, None], (outputs < call.outputs)[:, None]
    data = call.codes.data + outputs[:, None].to(tl.int64) * call.codes.width
    stop = tl.minimum((share + 1) * call.share, tl.cdiv(call.inputs, turn_inputs))
    steps = first_steps(call, outputs)
    scales = steps
    if coded:
        scales = starts_of(call.scales, rows[:, None])
    places, bounds = (data, source, known, real), (call.codes.width + 0, call.inputs + 0)
    for turn in range(share * call.share, stop):
        first = turn * turn_inputs
        if coded:
            found, taken = fetched(places, bounds, first + tl.arange(0, turn_inputs)[None, :])
            part = tl.dot(found, tl.trans(taken))
            if group is not None:
                # Scales first: codes times the scale of a row of large numbers may be beyond float32.
                step = tl.load(steps + turn, mask=known, other=0.0)
                sums += part * (step * tl.trans(tl.load(scales + turn, mask=real, other=0.0)))
            else:
                sums += part * tl.load(steps, mask=known, other=0.0)
        else:
            # Widened by halves: a whole turn of weights takes more registers than there are.
            places_of_half = tl.arange(0, half)[None, :]
            found, taken = fetched(places, bounds, first + places_of_half)
            found_later, taken_later = fetched(places, bounds, first + half + places_of_half)
            if group is not None:
                part = tl.dot(widened(found, taken.dtype), tl.trans(taken))
                part = tl.dot(widened(found_later, taken.dtype), tl.trans(taken_later), part)
                sums += part * tl.load(steps + turn, mask=known, other=0.0)
            else:
                sums = tl.dot(widened(found, taken.dtype), tl.trans(taken), sums)
                sums = tl.dot(widened(found_later, taken.dtype), tl.trans(taken_later), sums)
    return sums


@triton.jit
def first_steps(call, outputs):
    """The addresses of the first scale of each output, [output, 1]."""
    places = outputs[:, None]
    if call.codes.group is not None:
        places = places.to(tl.int64) * call.codes.groups
    return call.codes.steps + places


@triton.jit
def fetched(places, bounds, column):
    """Codes [output, input] and rows [row, input] of these inputs, zeros outside."""
    data, source, known, real = places
    width, inputs = bounds
    found = tl.load(data + column, mask=known & (column < width), other=0.0)
    return found, tl.load(source + column, mask=real & (column < inputs), other=0.0)


@triton.jit
def widened(found, dtype: tl.constexpr):
    """Codes of e4m3 as numbers of 16 bits, which hold them all; where chips know no e4m3, they are given as int8."""
    if found.dtype.is_fp8():
        # Half floats are what chips make of e4m3; bfloat16 is made of these by float32 four times as fast as at once.
        numbers = found.to(tl.float16).to(tl.float32).to(dtype)
    else:
        bits = (found.to(tl.int32) << 20) & KEPT
        numbers = (bits.to(tl.float32, bitcast=True) * LIFT).to(dtype)
    return numbers
