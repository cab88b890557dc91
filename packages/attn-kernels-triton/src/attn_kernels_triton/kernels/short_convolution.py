"""Short causal convolutions of one new row per request, with the last inputs cached in slots and updated in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.common import start_of


class Convolution(NamedTuple):
    """A depthwise convolution: `weight` [channel, taps], contiguous, the newest tap last, and `bias` [channel] or None.

    `tail` [slot, taps - 1, channel] holds the inputs before the newest, oldest first; `NO_ROWS` if there is one tap.
    `query`, `key` and `value` are the first channels of each; `taps` is a constant and `places` a power of two that is
    not smaller. All fields are None without a convolution.
    """

    weight: Any
    bias: Any
    tail: Rows
    query: Any
    key: Any
    value: Any
    taps: Any
    places: Any


class Convolve(NamedTuple):
    """The argument of the kernel that convolves queries and keys [request, query_size] and values [request, value_size]
    into `out` [request, channel], float32. `slots` are [request], int64; queries, and likewise keys, are `query_blocks`
    blocks of `block` channels, values `value_blocks`."""

    query: Rows
    key: Rows
    value: Rows
    out: Rows
    slots: Any
    convolution: Convolution
    query_size: Any
    value_size: Any
    query_blocks: Any
    value_blocks: Any
    block: Any


@triton.jit
def convolve_rows(call):
    """Convolve one block of channels. Grid: blocks of queries, keys, then values, for each request."""
    every = 2 * call.query_blocks + call.value_blocks
    request, block = tl.program_id(0) // every, tl.program_id(0) % every
    slot = tl.load(call.slots + request)
    if block < call.query_blocks:
        convolve_block(call, call.query, request, slot, call.convolution.query, block, call.query_size)
    elif block < 2 * call.query_blocks:
        convolve_block(call, call.key, request, slot, call.convolution.key, block - call.query_blocks, call.query_size)
    else:
        convolve_block(
            call, call.value, request, slot, call.convolution.value, block - 2 * call.query_blocks, call.value_size
        )


@triton.jit
def convolve_block(call, view, request, slot, first, block, size):
    """Convolve a block of channels of a row that begins at channel `first`, and update the cached inputs."""
    columns = block * call.block + tl.arange(0, call.block)
    rows = start_of(view, request, 0) + columns
    found, next_tail = convolve(call.convolution, rows, slot, first + columns, columns < size)
    tl.store(start_of(call.out, request, 0) + first + columns, found, mask=columns < size)
    # All threads must have read before any of them writes.
    tl.debug_barrier()
    store_tail(call.convolution, next_tail, slot, first + columns, columns < size)


@triton.jit
def convolve(convolution, rows, slot, channels, inside):
    """The convolved channels [channels] in float32, zero outside, and the inputs [places, channels] to be cached.

    `rows` are the addresses of the newest inputs. All taps are read as one tile: a load of fewer elements than a
    program has threads would be repeated by several threads.
    """
    taps: tl.constexpr = convolution.taps
    place = tl.arange(0, convolution.places)[:, None]
    newest = tl.load(rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    window = tl.where(place == taps - 1, newest, 0.0)
    next_tail = tl.where(place == taps - 2, newest, 0.0)
    if taps > 1:
        tail = start_of(convolution.tail, slot, 0) + place * convolution.tail.row + channels[None, :]
        window += tl.load(tail, mask=inside[None, :] & (place < taps - 1), other=0.0).to(tl.float32)
        later = tl.load(tail + convolution.tail.row, mask=inside[None, :] & (place < taps - 2), other=0.0)
        next_tail += later.to(tl.float32)
    weights = convolution.weight + channels[None, :] * taps + place
    window *= tl.load(weights, mask=inside[None, :] & (place < taps), other=0.0).to(tl.float32)
    found = tl.sum(window, 0)
    if convolution.bias is not None:
        found += tl.load(convolution.bias + channels, mask=inside, other=0.0).to(tl.float32)
    return found, next_tail


@triton.jit
def store_tail(convolution, next_tail, slot, channels, inside):
    """Write the cached inputs for later tokens, [places, channels]."""
    taps: tl.constexpr = convolution.taps
    if taps > 1:
        place = tl.arange(0, convolution.places)[:, None]
        tail = start_of(convolution.tail, slot, 0) + place * convolution.tail.row + channels[None, :]
        tl.store(tail, next_tail.to(convolution.tail.data.dtype.element_ty), mask=inside[None, :] & (place < taps - 1))
