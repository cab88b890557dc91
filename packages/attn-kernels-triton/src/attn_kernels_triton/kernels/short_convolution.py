"""Short causal convolutions of new rows, whose last inputs are kept in slots and replaced in the same pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.common import start_of


class Convolution(NamedTuple):
    """A convolution of each channel: `weight` [channel, taps], dense, the newest row last, `bias` [channel] or None.

    `tail` [slot, taps - 1, channel] are the inputs before the newest, oldest first, `NO_ROWS` where there is one tap.

    `query`, `key` and `value` are the first channels of each; `taps` is a constant. All is None where nothing is
    convolved.
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
    """Everything for the program that convolves queries and keys [request, size] of `query_size` elements and values of
    `value_size` into `out` [request, channel], float32. `slots` are [request], int64; of blocks of `block` channels
    queries fill `query_blocks`, keys as many, and values `value_blocks`."""

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
    """Grid: blocks of the channels of requests; those of queries, of keys, then of values."""
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
    """Convolve some channels of a row, of which `first` is the first channel, and remember them."""
    columns = block * call.block + tl.arange(0, call.block)
    rows = start_of(view, request, 0) + columns
    found, kept = convolved(call.convolution, rows, slot, first + columns, columns < size)
    tl.store(start_of(call.out, request, 0) + first + columns, found, mask=columns < size)
    # No thread writes before all have read.
    tl.debug_barrier()
    remember(call.convolution, kept, slot, first + columns, columns < size)


@triton.jit
def convolved(convolution, rows, slot, channels, inside):
    """The sums [channels] in float32, zero outside, and the inputs to be kept [places, channels] from now on.

    `rows` are the addresses of the newest inputs. All taps are read as one tile: loads of fewer elements than a program
    has threads would be repeated by each of them.
    """
    taps: tl.constexpr = convolution.taps
    place = tl.arange(0, convolution.places)[:, None]
    newest = tl.load(rows, mask=inside, other=0.0).to(tl.float32)[None, :]
    window = tl.where(place == taps - 1, newest, 0.0)
    kept = tl.where(place == taps - 2, newest, 0.0)
    if taps > 1:
        tail = start_of(convolution.tail, slot, 0) + place * convolution.tail.row + channels[None, :]
        window += tl.load(tail, mask=inside[None, :] & (place < taps - 1), other=0.0).to(tl.float32)
        later = tl.load(tail + convolution.tail.row, mask=inside[None, :] & (place < taps - 2), other=0.0)
        kept += later.to(tl.float32)
    weights = convolution.weight + channels[None, :] * taps + place
    window *= tl.load(weights, mask=inside[None, :] & (place < taps), other=0.0).to(tl.float32)
    found = tl.sum(window, 0)
    if convolution.bias is not None:
        found += tl.load(convolution.bias + channels, mask=inside, other=0.0).to(tl.float32)
    return found, kept


@triton.jit
def remember(convolution, kept, slot, channels, inside):
    """Write the inputs that later tokens read, [places, channels]."""
    taps: tl.constexpr = convolution.taps
    if taps > 1:
        place = tl.arange(0, convolution.places)[:, None]
        tail = start_of(convolution.tail, slot, 0) + place * convolution.tail.row + channels[None, :]
        tl.store(tail, kept.to(convolution.tail.data.dtype.element_ty), mask=inside[None, :] & (place < taps - 1))
