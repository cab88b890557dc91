"""The kernel that applies rotary embedding to queries and keys and writes keys and values to a cache in one pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.rowwise import Angles, RotaryTile, cos_sin_of_batch, rotate_halves, rotate_neighbours


class Append(NamedTuple):
    """The argument of the kernel: `query`, `key`, `value` and `out` [1, token, head, size]; the cached `key_memory` and
    `value_memory` [1, row, head, size], in which `slots` [token] are the rows of the tokens. `tile` is for one token,
    `value_width` a power of two that is not smaller than the size of values."""

    query: Rows
    key: Rows
    value: Rows
    out: Rows
    key_memory: Rows
    value_memory: Rows
    slots: Any
    angles: Angles
    tokens: Any
    heads: Any
    owners: Any
    tile: RotaryTile
    value_size: Any
    value_width: Any


@triton.jit
def rotate_append(call):
    """Rotate or copy one head of one token. Grid: tokens, for each of them query heads, key heads and value heads."""
    every = call.heads + 2 * call.owners
    token, head = tl.program_id(0) // every, tl.program_id(0) % every
    at = tl.cast(token, tl.int64)
    if head < call.heads:
        source = call.query.data + at * call.query.row + head * call.query.head
        rotate_head(call, token, source, call.out.data + at * call.out.row + head * call.out.head)
    else:
        slot = tl.load(call.slots + token).to(tl.int64)
        owner = (head - call.heads) % call.owners
        if head < call.heads + call.owners:
            source = call.key.data + at * call.key.row + owner * call.key.head
            target = call.key_memory.data + slot * call.key_memory.row + owner * call.key_memory.head
            rotate_head(call, token, source, target)
        else:
            across = tl.arange(0, call.value_width)
            inside = across < call.value_size
            source = call.value.data + at * call.value.row + owner * call.value.head
            target = call.value_memory.data + slot * call.value_memory.row + owner * call.value_memory.head
            tl.store(target + across, tl.load(source + across, mask=inside), mask=inside)


@triton.jit
def rotate_head(call, token, source, target):
    """Rotate one head of a token and copy the elements that are not rotated."""
    tokens = token + tl.arange(0, 1)
    pairs = tl.arange(0, call.tile.width)
    cosines, sines = cos_sin_of_batch(call, 0, tokens, pairs)
    real = (tokens < call.tokens)[:, None]
    source = source + tl.zeros([1, 1], tl.int32)
    target = target + tl.zeros([1, 1], tl.int32)
    if call.tile.interleaved:
        rotate_neighbours(source, target, cosines, sines, real, call.tile)
    else:
        rotate_halves(source, target, cosines, sines, real, call.tile)
    if call.tile.rest > 0:
        across = 2 * call.tile.pairs + tl.arange(0, call.tile.rest)[None, :]
        inside = real & (across < call.tile.size)
        tl.store(target + across, tl.load(source + across, mask=inside), mask=inside)
