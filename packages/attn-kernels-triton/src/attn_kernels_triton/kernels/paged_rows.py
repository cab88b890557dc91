"""Reading rows of memory by their numbers, as they are or in codes."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(32)
"""Numbers that share a step and a least value where codes have four bits."""


@triton.jit
def read_memory(memory, number, head, inside, size: tl.constexpr, width: tl.constexpr, into: tl.constexpr):
    """Rows [row, width] of a head, zeros where not `inside`; codes of a byte as they are, which every type holds."""
    if memory.low is not None:
        found = read_fours(memory, number, head, inside, size, width, into)
    else:
        across = tl.arange(0, width)
        at = memory.data + (number * memory.row + tl.cast(head, tl.int64) * memory.head)[:, None] + across[None, :]
        if size == width:
            found = tl.load(at, mask=inside[:, None], other=0).to(into)
        else:
            found = tl.load(at, mask=inside[:, None] & (across[None, :] < size), other=0).to(into)
    return found


@triton.jit
def times(number, stride):
    """Places behind the first; a stride of one is a constant, which Triton 3.6 knows as None inside of a loop."""
    place = tl.cast(number, tl.int64)
    if stride is not None:
        place = place * stride
    return place


@triton.jit
def read_scale(memory, number, head, inside):
    """By what codes of a byte are to be multiplied, [row], float32."""
    place = memory.step + times(number, memory.step_row) + times(head, memory.step_head)
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def read_fours(memory, number, head, inside, size: tl.constexpr, width: tl.constexpr, into: tl.constexpr):
    """Rows [row, width] of codes of four bits, two to a byte, a step and a least value for every `GROUP`."""
    rows: tl.constexpr = number.shape[0]
    half: tl.constexpr = width // 2
    groups: tl.constexpr = width // GROUP
    across = tl.arange(0, half)
    at = memory.data + (number * memory.row + tl.cast(head, tl.int64) * memory.head)[:, None] + across[None, :]
    pairs = tl.load(at, mask=inside[:, None] & (across[None, :] < size // 2), other=0)
    codes = tl.interleave(pairs & 15, pairs >> 4).to(tl.float32)
    across = tl.arange(0, groups)
    place = (times(number, memory.step_row) + times(head, memory.step_head))[:, None] + across[None, :]
    known = inside[:, None] & (across[None, :] < size // GROUP)
    step = tl.load(memory.step + place, mask=known, other=0.0).to(tl.float32)
    low = tl.load(memory.low + place, mask=known, other=0.0).to(tl.float32)
    step = tl.reshape(tl.broadcast_to(step[:, :, None], (rows, groups, GROUP)), (rows, width))
    low = tl.reshape(tl.broadcast_to(low[:, :, None], (rows, groups, GROUP)), (rows, width))
    return (low + step * codes).to(into)
