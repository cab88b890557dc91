"""Attention over a paged KV cache: some query rows of one request against a stretch of its context.

Query heads that share a key/value head, and neighbouring tokens, are rows of one tile. Stretches that do not cover the
whole context write partial outputs and lse, which a second kernel merges (Dao et al. 2023, "Flash-Decoding"; Kwon et
al. 2023, arXiv 2309.06180).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows, Rule
from attn_kernels_triton.kernels.common import LOG2_E, logits


class Memory(NamedTuple):
    """Rows [row, head, size] of all requests, and their strides.

    Codes where `step` [row, head] or [row, head, group] is given, four bits each where `low`, as `step`, is given too.
    """

    data: Any
    row: Any
    head: Any
    step: Any = None
    step_row: Any = None
    step_head: Any = None
    low: Any = None


NO_MEMORY = Memory(None, None, None)


class PagedTile(NamedTuple):
    """Constants: how many rows of queries and how many keys are taken at once, sizes, and these as powers of two.

    `rest_size` is that of the second part of keys that lie in two parts, else 0.
    """

    rows: Any
    keys: Any
    key_size: Any
    value_size: Any
    rest_size: Any
    key_width: Any
    value_width: Any
    rest_width: Any


class Paged(NamedTuple):
    """Everything for the program that meets rows in pages.

    `query` and `out` [1, token, head, size]. `value` is `NO_MEMORY` where values are the first part of keys, `rest`
    where keys have no second part. `numbers` [request, place] are rows in memory from position `firsts[request]` on,
    from 0 where `firsts` is None, `stride` its stride; where `page` is a number, those of pages of so many rows.
    `items` [item, 7] are, see `paged.items`: request, first token, first row, rows, first key, last key (exclusive),
    and where partial results go, -1 to the output. `sums` [slot, rows, value_width] and `lse` [slot, rows], float32,
    to the base 2, hold partial results. Of trees, whose tokens lie from position `bases[request]` on, `seen` [token,
    words], int32, has a bit for each token of its tree that a token sees; else both are None. Where `slots_of` [token],
    int32, is given, rows are tokens of several requests, whose partial results go to slots of `slot_rows` rows each.
    """

    query: Rows
    key: Memory
    rest: Memory
    value: Memory
    out: Rows
    numbers: Any
    stride: Any
    firsts: Any
    bases: Any
    seen: Any
    words: Any
    positions: Any
    items: Any
    sums: Any
    lse: Any
    heads: Any
    group: Any
    rule: Rule
    tile: PagedTile
    page: Any = None
    slots_of: Any = None
    slot_rows: Any = None


class Merge(NamedTuple):
    """Everything for the program that merges; `merges` [merge, 5] are first token, first row, rows, slot, slots."""

    out: Rows
    merges: Any
    sums: Any
    lse: Any
    heads: Any
    group: Any
    rule: Rule
    tile: PagedTile


GROUP = tl.constexpr(32)
"""Numbers that share a step and a least value where codes have four bits."""
BITS_OF_1, FRACTION = tl.constexpr(0x3F800000), tl.constexpr(0xF << 19)
"""The float32 number 1, and the upper four bits of its fraction."""
AT_ONCE = tl.constexpr(8)
"""Stretches of which partial results are merged at once."""


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
    # A code in the upper four bits of the fraction of 1 is the number 1 + code / 16: no integer need be converted.
    wide = pairs.to(tl.int32)
    low_half, high_half = (wide << 19) & FRACTION | BITS_OF_1, (wide << 15) & FRACTION | BITS_OF_1
    codes = tl.interleave(low_half, high_half).to(tl.float32, bitcast=True)
    across = tl.arange(0, groups)
    place = (times(number, memory.step_row) + times(head, memory.step_head))[:, None] + across[None, :]
    known = inside[:, None] & (across[None, :] < size // GROUP)
    step = tl.load(memory.step + place, mask=known, other=0.0).to(tl.float32) * 16.0
    low = tl.load(memory.low + place, mask=known, other=0.0).to(tl.float32) - step
    step = tl.reshape(tl.broadcast_to(step[:, :, None], (rows, groups, GROUP)), (rows, width))
    low = tl.reshape(tl.broadcast_to(low[:, :, None], (rows, groups, GROUP)), (rows, width))
    return (low + step * codes).to(into)


@triton.jit
def attend_paged(call):
    """Grid: items, for each key/value head."""
    owners = call.heads // call.group
    owner = tl.program_id(0) % owners
    number = tl.program_id(0) // owners
    item = call.items + number * 7
    request, begin, first, count = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    start, stop, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    token, head, real = rows_of(call, owner, begin, first, count)
    at = tl.load(call.positions + token).to(tl.int32)
    query = read_query(call, token, head, real, 0, call.tile.key_size, call.tile.key_width)
    rest = query
    if call.rest.data is not None:
        rest = read_query(call, token, head, real, call.tile.key_size, call.tile.rest_size, call.tile.rest_width)
    numbers = call.numbers + tl.cast(request, tl.int64) * call.stride
    if call.firsts is not None:
        numbers -= tl.load(call.firsts + request)
    here = (query, rest, head, at, owner, numbers, stop, (token, request, begin))
    summed = tl.zeros([call.tile.rows, call.tile.value_width], tl.float32)
    total = tl.zeros([call.tile.rows], tl.float32)
    top = tl.full([call.tile.rows], float("-inf"), tl.float32)
    running = (summed, total, top)
    tiles = tl.cdiv(stop - start, call.tile.keys)
    if call.seen is None:
        for step in range(tiles):
            running = meet(call, here, running, start + step * call.tile.keys, in_tree=False)
    else:
        # Keys before the tree are seen by all its tokens, and nothing is asked of bits.
        before = tl.maximum(tl.minimum(tl.load(call.bases + request), stop) - start, 0) // call.tile.keys
        for step in range(before):
            running = meet(call, here, running, start + step * call.tile.keys, in_tree=False)
        for step in range(before, tiles):
            running = meet(call, here, running, start + step * call.tile.keys, in_tree=True)
    summed, total, top = running
    if slot < 0:
        finish(call, (token, head, real), summed, total, top)
    else:
        keep(call, (token, head, real), slot + owner, owner, running)


@triton.jit
def keep(call, rows, slot, owner, running):
    """Write partial results to a slot, or where rows are of several requests, to so many behind the first of each."""
    token, head, real = rows
    summed, total, top = running
    if call.slots_of is None:
        place = tl.cast(slot, tl.int64) * call.tile.rows + tl.arange(0, call.tile.rows)
    else:
        own = tl.load(call.slots_of + token) + slot
        place = tl.cast(own, tl.int64) * call.slot_rows + head - owner * call.group
    across = tl.arange(0, call.tile.value_width)
    out = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    # Rows behind the last one are no results: a group of 4 heads fills a quarter of a tile.
    tl.store(call.sums + place[:, None] * call.tile.value_width + across[None, :], out, mask=real[:, None])
    tl.store(call.lse + place, top + tl.log2(total), mask=real)


@triton.jit
def rows_of(call, owner, begin, first, count):
    """Token and head of each row of a tile, and whether it is one."""
    row = tl.arange(0, call.tile.rows)
    real = row < count
    # Rows behind the last one read what the first one does.
    row = first + tl.where(real, row, 0)
    return begin + row // call.group, owner * call.group + row % call.group, real


@triton.jit
def read_query(call, token, head, real, first, size: tl.constexpr, width: tl.constexpr):
    """Elements of the rows of queries [rows, width] from `first` on."""
    across = tl.arange(0, width)
    at = call.query.data + (tl.cast(token, tl.int64) * call.query.row + head * call.query.head)[:, None]
    inside = real[:, None] & (across[None, :] < size)
    return tl.load(at + first + across[None, :], mask=inside, other=0.0)


@triton.jit
def meet(call, here, running, start, in_tree: tl.constexpr):
    """Meet one tile of keys, from position `start` on; some are of a tree if `in_tree`."""
    query, rest, head, at, owner, numbers, stop, own = here
    summed, total, top = running
    keys = start + tl.arange(0, call.tile.keys)
    inside = keys < stop
    number = rows_in_memory(call, numbers, keys, inside)
    key = read_memory(call.key, number, owner, inside, call.tile.key_size, call.tile.key_width, query.dtype)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    if call.rest.data is not None:
        other = read_memory(call.rest, number, owner, inside, call.tile.rest_size, call.tile.rest_width, query.dtype)
        products = tl.dot(rest, tl.trans(other), products, input_precision="ieee")
    if call.key.step is not None and call.key.low is None:
        products *= read_scale(call.key, number, owner, inside)[None, :]
    key_at = keys
    if in_tree:
        key_at = places_in_tree(call, own, keys, inside)
    powers, _ = logits(call, products, head[:, None], at[:, None], key_at[None, :])
    seen = inside[None, :] & (key_at[None, :] <= at[:, None])
    if call.rule.left is not None:
        seen = seen & (at[:, None] - key_at[None, :] <= call.rule.left)
    if in_tree:
        seen = seen & seen_in_tree(call, own, keys, inside)
    powers = tl.where(seen, powers, float("-inf"))
    highest = tl.maximum(top, tl.max(powers, 1))
    # Where nothing has been seen yet, a number in place of -inf, from which nothing can be subtracted.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shares = tl.exp2(powers - base[:, None])
    faded = tl.exp2(top - base)
    total = total * faded + tl.sum(shares, 1)
    if call.value.data is None:
        value = key
    else:
        value = read_memory(call.value, number, owner, inside, call.tile.value_size, call.tile.value_width, query.dtype)
        if call.value.step is not None and call.value.low is None:
            # A share for each key is less to multiply than a row for each.
            shares *= read_scale(call.value, number, owner, inside)[None, :]
    summed = tl.dot(shares.to(value.dtype), value, summed * faded[:, None], input_precision="ieee")
    return summed, total, highest


@triton.jit
def rows_in_memory(call, numbers, keys, inside):
    """Where keys lie in memory, int64."""
    if call.page is None:
        number = tl.cast(tl.load(numbers + keys, mask=inside, other=0), tl.int64)
    else:
        number = tl.cast(tl.load(numbers + keys // call.page, mask=inside, other=0), tl.int64)
        number = number * call.page + keys % call.page
    return number


@triton.jit
def places_in_tree(call, own, keys, inside):
    """Positions of keys, of which those of a tree are those of its tokens."""
    _, request, begin = own
    since = keys - tl.load(call.bases + request)
    place = tl.load(call.positions + begin + since, mask=inside & (since >= 0), other=0).to(tl.int32)
    return tl.where(since >= 0, place, keys)


@triton.jit
def seen_in_tree(call, own, keys, inside):
    """Whether the tokens of rows see keys of their tree; those before it they do."""
    token, request, _ = own
    since = keys - tl.load(call.bases + request)
    among = inside & (since >= 0)
    number = tl.maximum(since, 0)
    at = call.seen + (tl.cast(token, tl.int64) * call.words)[:, None] + (number // 32)[None, :]
    word = tl.load(at, mask=among[None, :], other=-1)
    return ((word >> (number % 32)[None, :]) & 1) != 0


@triton.jit
def finish(call, rows, summed, total, top):
    """Write rows of the output, zeros where nothing was seen, with the share of the sink."""
    token, head, real = rows
    if call.rule.sinks is not None:
        sink = tl.load(call.rule.sinks + head) * LOG2_E
        highest = tl.maximum(top, sink)
        faded = tl.exp2(top - highest)
        summed *= faded[:, None]
        total = total * faded + tl.exp2(sink - highest)
    across = tl.arange(0, call.tile.value_width)
    out = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    at = call.out.data + (tl.cast(token, tl.int64) * call.out.row + head * call.out.head)[:, None] + across[None, :]
    inside = real[:, None] & (across[None, :] < call.tile.value_size)
    tl.store(at, out.to(call.out.data.dtype.element_ty), mask=inside)


@triton.jit
def merge_paged(call):
    """Grid: rows of merges, for each key/value head; the sums of all stretches of a row, by their shares."""
    owners = call.heads // call.group
    row = tl.program_id(0) % call.tile.rows
    owner = tl.program_id(0) // call.tile.rows % owners
    item = call.merges + tl.program_id(0) // call.tile.rows // owners * 5
    begin, first, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    slot, slots = tl.load(item + 3), tl.load(item + 4)
    # What was not cut was written whole.
    if (row < count) & (slots > 1):
        across = tl.arange(0, call.tile.value_width)
        summed = tl.zeros([call.tile.value_width], tl.float32)
        total = 0.0
        top = float("-inf")
        for step in range(tl.cdiv(slots, AT_ONCE)):
            number = step * AT_ONCE + tl.arange(0, AT_ONCE)
            place = tl.cast(slot + number * owners + owner, tl.int64) * call.tile.rows + row
            lse = tl.load(call.lse + place, mask=number < slots, other=float("-inf"))
            inside = (number < slots)[:, None]
            sums = tl.load(call.sums + place[:, None] * call.tile.value_width + across[None, :], mask=inside, other=0.0)
            highest = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            faded, shares = tl.exp2(top - base), tl.exp2(lse - base)
            summed = summed * faded + tl.sum(sums * shares[:, None], 0)
            total = total * faded + tl.sum(shares, 0)
            top = highest
        place = first + row
        finish_row(call, (begin + place // call.group, owner * call.group + place % call.group), summed, total, top)


@triton.jit
def finish_row(call, row, summed, total, top):
    """Write a row of the output, as `finish` writes several."""
    token, head = row
    if call.rule.sinks is not None:
        sink = tl.load(call.rule.sinks + head) * LOG2_E
        highest = tl.maximum(top, sink)
        faded = tl.exp2(top - highest)
        summed *= faded
        total = total * faded + tl.exp2(sink - highest)
    across = tl.arange(0, call.tile.value_width)
    out = summed / tl.where(total == 0.0, 1.0, total)
    at = call.out.data + tl.cast(token, tl.int64) * call.out.row + head * call.out.head + across
    tl.store(at, out.to(call.out.data.dtype.element_ty), mask=across < call.tile.value_size)


class Layout(NamedTuple):
    """Everything for the program that cuts a step in which each of `requests` requests computes one token.

    `contexts` [request] is how many rows each remembers before it, -1 where there is no request; `items` [item, 7] and
    `merges` [request * tiles, 5] are written, see `Paged` and `Merge`. A token is `tiles` tiles of `tile` of `group`
    heads; stretches are to be about `wanted` in all, none shorter than `shortest` and each of whole tiles of
    `tile_keys`. `left` is how far a query sees, `width` a power of two that is not smaller than `requests`.
    """

    contexts: Any
    items: Any
    merges: Any
    requests: Any
    room: Any
    wanted: Any
    owners: Any
    left: Any
    tiles: Any
    tile: Any
    group: Any
    shortest: Any
    tile_keys: Any
    width: Any


LAID = tl.constexpr(64)
"""Items that a program lays out."""


@triton.jit
def lay_out(call):
    """Grid: blocks of `LAID` items; those behind the last one have no rows."""
    request = tl.arange(0, call.width)
    known = request < call.requests
    held = tl.load(call.contexts + request, mask=known, other=-1).to(tl.int32) + 1
    seen = held
    if call.left is not None:
        seen = tl.minimum(held, call.left + 1)
    # As many keys for each item, whoever remembers them: one long request would keep the others waiting.
    length = tl.cdiv(tl.sum(seen.to(tl.int64), 0) * call.tiles, call.wanted).to(tl.int32)
    length = tl.cdiv(tl.maximum(length, 1), call.shortest) * call.shortest
    # To the nearest number: a little more than one stretch is one, not a long one and a short one.
    pieces = tl.where(known, tl.maximum((2 * seen + length) // (2 * length), 1), 0)
    own_length = tl.cdiv(tl.cdiv(seen, tl.maximum(pieces, 1)), call.tile_keys) * call.tile_keys
    ends = tl.cumsum(pieces * call.tiles, 0)
    starts = ends - pieces * call.tiles
    if tl.program_id(0) == 0:
        lay_merges(call, request, starts, pieces)
    number = tl.program_id(0) * LAID + tl.arange(0, LAID)
    who = tl.sum((ends[None, :] <= number[:, None]).to(tl.int32), 1)
    own = request[None, :] == who[:, None]
    several = tl.sum(tl.where(own, pieces[None, :], 0), 1)
    real = several > 0
    place = number - tl.sum(tl.where(own, starts[None, :], 0), 1)
    tile = place // tl.maximum(several, 1)
    last = tl.sum(tl.where(own, held[None, :], 0), 1)
    oldest = last - tl.sum(tl.where(own, seen[None, :], 0), 1)
    own_length = tl.sum(tl.where(own, own_length[None, :], 0), 1)
    start = tl.minimum(oldest + (place - tile * several) * own_length, last)
    at, inside = call.items + number * 7, number < call.room
    count = tl.minimum(call.group - tile * call.tile, call.tile)
    tl.store(at, tl.where(real, who, 0), mask=inside)
    tl.store(at + 1, tl.where(real, who, 0), mask=inside)
    tl.store(at + 2, tl.where(real, tile * call.tile, 0), mask=inside)
    tl.store(at + 3, tl.where(real, count, 0), mask=inside)
    tl.store(at + 4, tl.where(real, start, 0), mask=inside)
    tl.store(at + 5, tl.where(real, tl.minimum(start + own_length, last), 0), mask=inside)
    tl.store(at + 6, tl.where(several > 1, number * call.owners, -1), mask=inside)


@triton.jit
def lay_merges(call, request, starts, pieces):
    """Write the merges of all tiles of all requests."""
    known = request < call.requests
    for tile in range(call.tiles):
        at = call.merges + (request * call.tiles + tile) * 5
        tl.store(at, request, mask=known)
        tl.store(at + 1, tl.zeros_like(request) + tile * call.tile, mask=known)
        count = tl.minimum(call.group - tile * call.tile, call.tile)
        tl.store(at + 2, tl.zeros_like(request) + count, mask=known)
        tl.store(at + 3, (starts + tile * pieces) * call.owners, mask=known)
        tl.store(at + 4, pieces, mask=known)
