"""Products of rows with weights in FP8 (e4m3), and the kernels that quantize rows to it (arXiv 2209.05433)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.rowwise import Matrix, RowTile, starts_of

LARGEST = tl.constexpr(448.0)
"""The largest number of e4m3, which has no infinity."""
LEAST = tl.constexpr(1.1754943508222875e-38)
"""The smallest scale, the smallest normal number of float32: rows of zeros or subnormal numbers can be divided by
it."""
KEPT = tl.constexpr(-0x78100000)
"""The mask of a code, sign-extended and shifted to bits 20 to 27: the float32 sign bit and the other seven bits."""
LIFT = tl.constexpr(2.0**120)
"""The factor for such bits: the exponent bias of float32 exceeds that of e4m3 by 120."""


class RoundedRows(NamedTuple):
    """The argument of the kernels that quantize `rows` [row, inputs] to `codes` [row, inputs], e4m3, with `scales`
    [row, group], float32; a row has `groups` groups, 1 if all inputs share a scale.

    The width of the `tile` is the number of inputs taken at once; its `size`, a constant, that of a group, or None.
    """

    rows: Matrix
    codes: Matrix
    scales: Matrix
    inputs: Any
    groups: Any
    tile: RowTile


@triton.jit
def round_rows(call):
    """Quantize rows with one scale each, so that the largest magnitude of a row becomes 448. Grid: rows."""
    row = tl.program_id(0)
    source, into = starts_of(call.rows, row), starts_of(call.codes, row)
    # Triton 3.6 loses integers and constants of tuples inside loops.
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
    """Quantize rows with one scale per group of neighbouring inputs. Grid: rows."""
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
    """The scale for numbers whose largest magnitude is `highest`; infinite if that is."""
    return tl.where(highest > LARGEST * LEAST, tl.div_rn(highest, LARGEST), LEAST)


@triton.jit
def code_of(found, scale):
    """Quantize float32 numbers to e4m3 with a scale: NaN stays NaN, and infinity becomes 448 (with an infinite scale).

    Values are clamped by comparisons, which keep NaN, while minimum and maximum would drop it.
    """
    infinite = tl.abs(found) == float("inf")
    scaled = tl.where(infinite, tl.where(found > 0.0, LARGEST, -LARGEST), tl.div_rn(found, scale))
    scaled = tl.where(scaled > LARGEST, LARGEST, scaled)
    return tl.where(scaled < -LARGEST, -LARGEST, scaled).to(tl.float8e4nv)


@triton.jit
def summed_e4m3(call, outputs, rows, split):
    """The sums [output, row] over the inputs of one split.

    If rows are codes, too, tensor cores multiply in FP8. They accumulate with less precision than float32 (14 bits on
    Hopper, arXiv 2412.19437, section 3.3.2), so the sums of each loop iteration are accumulated in float32.
    """
    # Triton 3.6 loses integers and constants of tuples inside loops: all that they need is computed before.
    step_inputs: tl.constexpr = call.tile.inputs
    half: tl.constexpr = step_inputs // 2
    group: tl.constexpr = call.codes.group
    coded: tl.constexpr = call.scales.data is not None
    sums = tl.zeros([call.tile.outputs, call.tile.rows], tl.float32)
    source = call.rows.data + rows[:, None].to(tl.int64) * call.rows.row
    real, known = (rows < call.count)[:, None], (outputs < call.outputs)[:, None]
    data = call.codes.data + outputs[:, None].to(tl.int64) * call.codes.width
    stop = tl.minimum((split + 1) * call.split_steps, tl.cdiv(call.inputs, step_inputs))
    steps = first_steps(call, outputs)
    scales = steps
    if coded:
        scales = starts_of(call.scales, rows[:, None])
    places, bounds = (data, source, known, real), (call.codes.width + 0, call.inputs + 0)
    for iteration in range(split * call.split_steps, stop):
        first = iteration * step_inputs
        if coded:
            found, taken = load_codes_and_rows(places, bounds, first + tl.arange(0, step_inputs)[None, :])
            part = tl.dot(found, tl.trans(taken))
            if group is not None:
                # Both scales are multiplied first: a product of codes times the scale of one row may overflow float32.
                step = tl.load(steps + iteration, mask=known, other=0.0)
                sums += part * (step * tl.trans(tl.load(scales + iteration, mask=real, other=0.0)))
            else:
                sums += part * tl.load(steps, mask=known, other=0.0)
        else:
            # Widened in two halves: all weights of an iteration at once would need too many registers.
            places_of_half = tl.arange(0, half)[None, :]
            found, taken = load_codes_and_rows(places, bounds, first + places_of_half)
            found_later, taken_later = load_codes_and_rows(places, bounds, first + half + places_of_half)
            if group is not None:
                part = tl.dot(widened(found, taken.dtype), tl.trans(taken))
                part = tl.dot(widened(found_later, taken.dtype), tl.trans(taken_later), part)
                sums += part * tl.load(steps + iteration, mask=known, other=0.0)
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
def load_codes_and_rows(places, bounds, column):
    """Load the codes [output, input] and rows [row, input] of these inputs, with zeros outside."""
    data, source, known, real = places
    width, inputs = bounds
    found = tl.load(data + column, mask=known & (column < width), other=0.0)
    return found, tl.load(source + column, mask=real & (column < inputs), other=0.0)


@triton.jit
def widened(found, dtype: tl.constexpr):
    """Convert e4m3 codes to a 16-bit dtype, which is exact; they are int8 on GPUs that do not support e4m3."""
    if found.dtype.is_fp8():
        # GPUs convert e4m3 to float16; bfloat16 by way of float32 is four times as fast as a direct conversion.
        numbers = found.to(tl.float16).to(tl.float32).to(dtype)
    else:
        bits = (found.to(tl.int32) << 20) & KEPT
        numbers = (bits.to(tl.float32, bitcast=True) * LIFT).to(dtype)
    return numbers
