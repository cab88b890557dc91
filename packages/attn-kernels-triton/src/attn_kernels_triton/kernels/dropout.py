"""Which weights are dropped: words of Philox, counted by where a pair stands, so tiles of any size drop the same."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def counted(call, who):
    """The seed, the two counters that a tile has in common, and the threshold of words."""
    batch, head, text = who
    state = call.dropout.state
    row = tl.load(state + 2) + batch
    if call.texts is not None:
        row = tl.load(state + 2) + text[4]
    row = row * call.shape.heads + head
    return tl.load(state), row.to(tl.uint32), tl.load(state + 1).to(tl.uint32), tl.load(state + 3).to(tl.uint32)


@triton.jit
def kept(call, who, rows, first):
    """Whether the weights of a tile [query, key] stay, whose keys are counted from `first` on, a multiple of 4."""
    seed, row, offset, threshold = counted(call, who)
    queries: tl.constexpr = call.tile.queries
    keys: tl.constexpr = call.tile.keys
    key = tl.zeros([queries, keys // 4], tl.uint32) + (first // 4 + tl.arange(0, keys // 4))[None, :].to(tl.uint32)
    query = tl.zeros([queries, keys // 4], tl.uint32) + rows[:, None].to(tl.uint32)
    zero, one, two, three = tl.philox(seed, key, query, row + key * 0, offset + key * 0)
    words = tl.reshape(tl.join(tl.join(zero, two), tl.join(one, three)), [queries, keys])
    return words >= threshold


@triton.jit
def kept_anywhere(call, who, rows, keys):
    """Whether the weights of a tile [query, key] stay, whose keys begin anywhere."""
    seed, row, offset, threshold = counted(call, who)
    key = tl.zeros([call.tile.queries, call.tile.keys], tl.uint32) + (keys // 4)[None, :].to(tl.uint32)
    query = key * 0 + rows[:, None].to(tl.uint32)
    zero, one, two, three = tl.philox(seed, key, query, row + key * 0, offset + key * 0)
    place = (keys % 4)[None, :]
    words = tl.where(place == 0, zero, tl.where(place == 1, one, tl.where(place == 2, two, three)))
    return words >= threshold
