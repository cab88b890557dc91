"""Which tiles a program walks over."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spans(call, first, last, reach, count, size: tl.constexpr):
    """Tiles of `size` that places `first` to `last` meet, of `count` places: where they start, where whole ones start
    and stop, where they stop. `reach` is how far before and after a place others are met; None is no bound.
    """
    before, after = reach
    start = 0
    whole_start = 0
    if before is not None:
        start = tl.maximum(first - before, 0)
        whole_start = tl.maximum(last - before, 0)
    stop = count
    whole_stop = count
    if after is not None:
        stop = tl.maximum(tl.minimum(last + after + 1, count), 0)
        whole_stop = tl.maximum(tl.minimum(first + after + 1, count), 0)
    start = tl.minimum(start // size, tl.cdiv(count, size))
    stop = tl.maximum(tl.cdiv(stop, size), start)
    if call.places.keep is None and call.places.pairs is None and call.places.key is None:
        whole_start = tl.minimum(tl.maximum(tl.cdiv(whole_start, size), start), stop)
        whole_stop = tl.maximum(tl.minimum(whole_stop // size, stop), whole_start)
    else:
        # Something must be asked of every pair.
        whole_start = start
        whole_stop = start
    return start, whole_start, whole_stop, stop


@triton.jit
def listed(starts, blocks, row, size: tl.constexpr):
    """The first and the last tile, exclusive, of what a list says of a row of blocks; blocks hold several tiles."""
    several: tl.constexpr = blocks.size // size
    return tl.load(starts + row) * several, tl.load(starts + row + 1) * several


@triton.jit
def listed_tile(blocks, columns, step, size: tl.constexpr):
    """The tile that is met at a step through a list."""
    several: tl.constexpr = blocks.size // size
    entry = step // several
    # Not by %, which the interpreter lacks for its loop variables.
    return tl.load(columns + entry) * several + (step - entry * several)
