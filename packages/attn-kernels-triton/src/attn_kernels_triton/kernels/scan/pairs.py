"""Products of the tokens of a chunk that fade between them, lower triangular, and gradients through them.

Where channels fade apart, a chunk is halved down to single tokens: later halves meet earlier ones, and what fades
between two tokens is split at the middle, so that both factors are at most 1 and nothing overflows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.scan.rows import faded_at, product, read_part


@triton.jit
def pairs(scan, left, right, who, chunk):
    """Entry [i, j] is Σ_c l_ic r_jc e^(faded_ic - faded_jc) for j ≤ i and zero for j > i; float32 [C, C]."""
    index = tl.arange(0, scan.tile.chunk)
    rows = chunk * scan.tile.chunk + index
    found = tl.zeros([scan.tile.chunk, scan.tile.chunk], tl.float32)
    for first in range(0, scan.tile.key_width, scan.tile.keys_at_once):
        columns = first + tl.arange(0, scan.tile.keys_at_once)
        one = read_part(left, who, rows, scan.tokens, columns, scan.tile.key_size)
        other = read_part(right, who, rows, scan.tokens, columns, scan.tile.key_size)
        if scan.tile.channels:
            found += channel_pairs(scan, who, one, other, rows, columns)
        else:
            found = product(scan.tile.split, one, tl.trans(other), found)
    if not scan.tile.channels:
        found *= between(scan, who, rows)
    return tl.where(index[:, None] >= index[None, :], found, 0.0)


@triton.jit
def between(scan, who, rows):
    """What fades between two tokens of a chunk whose channels fade alike, [C, C]; 1 where the second is later."""
    found = 1.0
    if scan.faded.data is not None:
        faded = faded_at(scan, who, rows, rows)
        found = tl.exp2(tl.minimum(faded - tl.trans(faded), 0.0))
    return found


@triton.jit
def channel_pairs(scan, who, one, other, rows, columns):
    """The pairs over some channels that fade apart; what lies above the diagonal is zero."""
    index = tl.arange(0, scan.tile.chunk)
    faded = faded_at(scan, who, rows, columns)
    own = tl.sum(one.to(tl.float32) * other.to(tl.float32), 1)
    found = tl.where(index[:, None] == index[None, :], own[:, None], 0.0)
    for turn in range(scan.tile.rounds):
        half = 1 << turn
        later, left = halves(scan, who, (rows, columns), faded, half)
        upper = tl.where(later[:, None], one * left, 0.0).to(one.dtype)
        lower = tl.where(later[:, None], 0.0, other * left).to(one.dtype)
        across = product(scan.tile.split, upper, tl.trans(lower))
        found += tl.where(index[:, None] // (2 * half) == index[None, :] // (2 * half), across, 0.0)
    return found


@triton.jit
def halves(scan, who, at, faded, half):
    """Which tokens lie in second halves, and what is left between each token and the middle of its two halves."""
    index = tl.arange(0, scan.tile.chunk)
    later = index // half % 2 == 1
    middle = faded_at(scan, who, at[0] - index % (2 * half) + half - 1, at[1])
    return later, tl.exp2(tl.where(later[:, None], faded - middle, middle - faded))


@triton.jit
def through_pairs(scan, change, content, who, at):
    """Gradients [C, columns] to both sides of `pairs`, of a gradient to them that is zero where they are."""
    one, other = content
    rows, columns = at
    if scan.tile.channels:
        index = tl.arange(0, scan.tile.chunk)
        faded = faded_at(scan, who, rows, columns)
        own = tl.sum(tl.where(index[:, None] == index[None, :], change, 0.0), 1)[:, None]
        to_one, to_other = own * other, own * one
        for turn in range(scan.tile.rounds):
            half = 1 << turn
            later, left = halves(scan, who, at, faded, half)
            same = index[:, None] // (2 * half) == index[None, :] // (2 * half)
            across = same & later[:, None] & (index[None, :] // half % 2 == 0)
            part = tl.where(across, change, 0.0).to(one.dtype)
            upper, lower = (one * left).to(one.dtype), (other * left).to(one.dtype)
            to_one += left * product(scan.tile.split, part, lower)
            to_other += left * product(scan.tile.split, tl.trans(part), upper)
    else:
        part = (change * between(scan, who, rows)).to(one.dtype)
        to_one = product(scan.tile.split, part, other)
        to_other = product(scan.tile.split, tl.trans(part), one)
    return to_one, to_other
