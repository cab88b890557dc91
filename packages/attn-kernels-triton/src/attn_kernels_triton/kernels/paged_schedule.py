"""Splitting recorded steps into work items (tiles of tokens, splits of keys) on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

ITEMS = tl.constexpr(16)
"""The number of items that one program writes; each is compared with all requests."""


class Schedule(NamedTuple):
    """The argument of the kernel that splits a step of `requests` requests, each with a chunk of tokens, into work
    items.

    `starts` [request + 1] are the first token of each request, and the end; `contexts` [request] is the number of
    cached rows before the chunk, -1 if there is no request, whose tokens attend to no keys. `items` [room, 7] and
    `merges` [merged, 5] are written, see `Paged` and `Merge`. Tiles have `tile` rows, tokens times `group` heads, of up
    to `tile_tokens` tokens. About `wanted` splits are made in all, none shorter than `shortest`, each of whole tiles of
    `tile_keys`. `left` is the window of a query, `width` a power of two that is not smaller than `requests`.
    """

    starts: Any
    contexts: Any
    items: Any
    merges: Any
    requests: Any
    room: Any
    merged: Any
    wanted: Any
    owners: Any
    left: Any
    tile: Any
    tile_tokens: Any
    group: Any
    shortest: Any
    tile_keys: Any
    width: Any


@triton.jit
def schedule_step(call):
    """Write the items and merges of a step. Grid: blocks of `ITEMS` items; surplus items have no rows."""
    request = tl.arange(0, call.width)
    known = request < call.requests
    begin = tl.load(call.starts + request, mask=known, other=0).to(tl.int32)
    tokens = tl.load(call.starts + request + 1, mask=known, other=0).to(tl.int32) - begin
    context = tl.load(call.contexts + request, mask=known, other=-1).to(tl.int32)
    tiles = tl.cdiv(tokens * call.group, call.tile)
    # The largest number of keys that a tile of a request sees: that of its last tile, bounded by the window.
    seen = tl.where(context < 0, 0, context + tokens)
    if call.left is not None:
        seen = tl.minimum(seen, call.left + call.tile_tokens)
    length = tl.cdiv(tl.sum(seen.to(tl.int64) * tiles, 0), call.wanted).to(tl.int32)
    length = tl.cdiv(tl.maximum(length, 1), call.shortest) * call.shortest
    # Rounded to the nearest number of splits: a little more than one split's length is not split.
    pieces = tl.maximum((2 * seen + length) // (2 * length), 1)
    cut = tl.where(pieces > 1, tiles, 0)
    ends, slot_ends, merge_ends = tl.cumsum(tiles * pieces, 0), tl.cumsum(cut * pieces, 0), tl.cumsum(cut, 0)
    firsts = (ends - tiles * pieces, slot_ends - cut * pieces, merge_ends - cut)
    lengths = (begin, tokens, context, pieces)
    number = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    schedule_items(call, request, number, ends, firsts, lengths)
    schedule_merges(call, request, number, merge_ends, firsts, lengths)


@triton.jit
def of_owner(own, values):
    """The value [item] of the request that each item belongs to, 0 if there is none."""
    return tl.sum(tl.where(own, values[None, :], 0), 1)


@triton.jit
def schedule_items(call, request, number, ends, firsts, lengths):
    """Write the items with these numbers."""
    begin, tokens, context, pieces = lengths
    who = tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1)
    own = request[None, :] == who[:, None]
    item_pieces = of_owner(own, pieces)
    real = who < call.requests
    place = number - of_owner(own, firsts[0])
    tile = place // tl.maximum(item_pieces, 1)
    piece = place - tile * item_pieces
    rows = of_owner(own, tokens) * call.group
    before = of_owner(own, context)
    first = tile * call.tile
    count = tl.minimum(rows - first, call.tile)
    last = tl.where(before < 0, 0, before + (first + count - 1) // call.group + 1)
    oldest = tl.zeros_like(last)
    if call.left is not None:
        oldest = tl.maximum(before + first // call.group - call.left, 0)
    own_length = (
        tl.cdiv(tl.cdiv(tl.maximum(last - oldest, 0), tl.maximum(item_pieces, 1)), call.tile_keys) * call.tile_keys
    )
    start = tl.minimum(oldest + piece * own_length, last)
    slot = (of_owner(own, firsts[1]) + place) * call.owners
    at, inside = call.items + number * 7, number < call.room
    tl.store(at, tl.where(real, who, 0), mask=inside)
    tl.store(at + 1, tl.where(real, of_owner(own, begin), 0), mask=inside)
    tl.store(at + 2, tl.where(real, first, 0), mask=inside)
    tl.store(at + 3, tl.where(real, count, 0), mask=inside)
    tl.store(at + 4, tl.where(real, start, 0), mask=inside)
    tl.store(at + 5, tl.where(real, tl.minimum(start + own_length, last), 0), mask=inside)
    tl.store(at + 6, tl.where(real & (item_pieces > 1), slot, -1), mask=inside)


@triton.jit
def schedule_merges(call, request, number, ends, firsts, lengths):
    """Write the merge entries with these numbers, one for each tile whose keys are split; surplus ones have no rows."""
    begin, tokens, _, pieces = lengths
    who = tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1)
    own = request[None, :] == who[:, None]
    item_pieces = of_owner(own, pieces)
    real = who < call.requests
    tile = number - of_owner(own, firsts[2])
    count = tl.minimum(of_owner(own, tokens) * call.group - tile * call.tile, call.tile)
    at, inside = call.merges + number * 5, number < call.merged
    tl.store(at, tl.where(real, of_owner(own, begin), 0), mask=inside)
    tl.store(at + 1, tl.where(real, tile * call.tile, 0), mask=inside)
    tl.store(at + 2, tl.where(real, count, 0), mask=inside)
    tl.store(at + 3, tl.where(real, (of_owner(own, firsts[1]) + tile * item_pieces) * call.owners, 0), mask=inside)
    tl.store(at + 4, tl.where(real, item_pieces, 0), mask=inside)
