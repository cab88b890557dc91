"""Attention over a paged KV cache: a tile of query rows of one request against a split of its context.

The query heads that share a key/value head, and neighbouring tokens, are rows of one tile. Splits (stretches) that do
not cover the whole context write partial outputs and lse, which a second kernel merges (Dao et al. 2023,
"Flash-Decoding"; Kwon et al. 2023, arXiv 2309.06180).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows, Rule
from attn_kernels_triton.kernels.common import LOG2_E, logits


class CachedRows(NamedTuple):
    """The cached rows [row, head, size] of all requests (keys or values), and their strides.

    They are int8 codes if the scale `step` [row, head] is given, and 4-bit codes if `step` [row, head, group] and the
    minimum `low` of the same shape are given.
    """

    data: Any
    row: Any
    head: Any
    step: Any = None
    step_row: Any = None
    step_head: Any = None
    low: Any = None


NO_CACHE = CachedRows(None, None, None)


class PagedTile(NamedTuple):
    """Compile-time constants: query rows and keys of a tile, the sizes, and these rounded up to powers of two.

    `rest_size` is the size of the second part of keys that are stored in two parts, else 0.
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
    """The argument of the paged attention kernel.

    `query` and `out` are [1, token, head, size]. `value` is `NO_CACHE` if values are the first part of keys, `rest` if
    keys have no second part. `numbers` [request, place], with stride `stride`, are the cache rows from position
    `firsts[request]` on (from 0 if `firsts` is None); if `page` is given, they are the numbers of pages of `page` rows.
    `items` [item, 7], see `paged.host_plan.Item`: request, first token, first row, number of rows, first key, end of
    the keys, and the slot of partial results (-1: write the output). `sums` [slot, rows, value_width] and `lse` [slot,
    rows], base 2, hold partial results, float32. For draft trees, whose tokens begin at position `bases[request]`,
    `seen` [token, words], int32, has a bit for each token of the tree that a token sees; else both are None. If
    `slots_of` [token], int32, is given, rows belong to several requests, whose partial results go to slots of
    `slot_rows` rows each.
    """

    query: Rows
    key: CachedRows
    rest: CachedRows
    value: CachedRows
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
    """The argument of the merge kernel; `merges` [merge, 5] are first token, first row, number of rows, first slot, and
    number of slots."""

    out: Rows
    merges: Any
    sums: Any
    lse: Any
    heads: Any
    group: Any
    rule: Rule
    tile: PagedTile


GROUP = tl.constexpr(32)
"""The number of 4-bit codes that share a step and a minimum."""
BITS_OF_1, FRACTION = tl.constexpr(0x3F800000), tl.constexpr(0xF << 19)
"""The bits of the float32 number 1, and a mask of the upper four bits of its fraction."""
AT_ONCE = tl.constexpr(8)
"""The number of partial results that are merged at once."""


@triton.jit
def read_cached(cache, number, head, inside, size: tl.constexpr, width: tl.constexpr, into: tl.constexpr):
    """Load rows [row, width] of a head, with zeros where not `inside`.

    Int8 codes are converted to `into` without their scale: every dtype represents them exactly.
    """
    if cache.low is not None:
        found = read_int4(cache, number, head, inside, size, width, into)
    else:
        across = tl.arange(0, width)
        at = cache.data + (number * cache.row + tl.cast(head, tl.int64) * cache.head)[:, None] + across[None, :]
        if size == width:
            found = tl.load(at, mask=inside[:, None], other=0).to(into)
        else:
            found = tl.load(at, mask=inside[:, None] & (across[None, :] < size), other=0).to(into)
    return found


@triton.jit
def times(number, stride):
    """`number` times `stride`; a stride of 1 is a constant, which Triton 3.6 turns into None inside loops."""
    place = tl.cast(number, tl.int64)
    if stride is not None:
        place = place * stride
    return place


@triton.jit
def read_scale(cache, number, head, inside):
    """Load the scales of int8 codes, [row], float32."""
    place = cache.step + times(number, cache.step_row) + times(head, cache.step_head)
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def read_int4(cache, number, head, inside, size: tl.constexpr, width: tl.constexpr, into: tl.constexpr):
    """Load and dequantize rows [row, width] of 4-bit codes, two in a byte, with a step and a minimum per `GROUP`."""
    rows: tl.constexpr = number.shape[0]
    half: tl.constexpr = width // 2
    groups: tl.constexpr = width // GROUP
    across = tl.arange(0, half)
    at = cache.data + (number * cache.row + tl.cast(head, tl.int64) * cache.head)[:, None] + across[None, :]
    pairs = tl.load(at, mask=inside[:, None] & (across[None, :] < size // 2), other=0)
    # A code in the upper four bits of the fraction of 1 gives 1 + code / 16, which avoids integer conversions.
    wide = pairs.to(tl.int32)
    low_half, high_half = (wide << 19) & FRACTION | BITS_OF_1, (wide << 15) & FRACTION | BITS_OF_1
    codes = tl.interleave(low_half, high_half).to(tl.float32, bitcast=True)
    across = tl.arange(0, groups)
    place = (times(number, cache.step_row) + times(head, cache.step_head))[:, None] + across[None, :]
    known = inside[:, None] & (across[None, :] < size // GROUP)
    step = tl.load(cache.step + place, mask=known, other=0.0).to(tl.float32) * 16.0
    low = tl.load(cache.low + place, mask=known, other=0.0).to(tl.float32) - step
    step = tl.reshape(tl.broadcast_to(step[:, :, None], (rows, groups, GROUP)), (rows, width))
    low = tl.reshape(tl.broadcast_to(low[:, :, None], (rows, groups, GROUP)), (rows, width))
    return (low + step * codes).to(into)


@triton.jit
def attend_paged(call):
    """Compute the output, or a partial output, of each work item. Grid: items, for each key/value head."""
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
            running = attend_keys(call, here, running, start + step * call.tile.keys, in_tree=False)
    else:
        # Keys before the tree are visible to all its tokens, so their tiles need no tree mask.
        before = tl.maximum(tl.minimum(tl.load(call.bases + request), stop) - start, 0) // call.tile.keys
        for step in range(before):
            running = attend_keys(call, here, running, start + step * call.tile.keys, in_tree=False)
        for step in range(before, tiles):
            running = attend_keys(call, here, running, start + step * call.tile.keys, in_tree=True)
    summed, total, top = running
    if slot < 0:
        finish(call, (token, head, real), summed, total, top)
    else:
        write_partial(call, (token, head, real), slot + owner, owner, running)


@triton.jit
def write_partial(call, rows, slot, owner, running):
    """Write partial results to a slot; if rows belong to several requests, `slot` is relative to the first of each."""
    token, head, real = rows
    summed, total, top = running
    if call.slots_of is None:
        place = tl.cast(slot, tl.int64) * call.tile.rows + tl.arange(0, call.tile.rows)
    else:
        own = tl.load(call.slots_of + token) + slot
        place = tl.cast(own, tl.int64) * call.slot_rows + head - owner * call.group
    across = tl.arange(0, call.tile.value_width)
    out = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    # Padding rows are not written: a group of 4 heads, for example, fills only a quarter of a tile.
    tl.store(call.sums + place[:, None] * call.tile.value_width + across[None, :], out, mask=real[:, None])
    tl.store(call.lse + place, top + tl.log2(total), mask=real)


@triton.jit
def rows_of(call, owner, begin, first, count):
    """The token and head of each row of a tile, and whether the row exists."""
    row = tl.arange(0, call.tile.rows)
    real = row < count
    # Padding rows read the same as the first row.
    row = first + tl.where(real, row, 0)
    return begin + row // call.group, owner * call.group + row % call.group, real


@triton.jit
def read_query(call, token, head, real, first, size: tl.constexpr, width: tl.constexpr):
    """Load the elements of query rows [rows, width] from element `first` on."""
    across = tl.arange(0, width)
    at = call.query.data + (tl.cast(token, tl.int64) * call.query.row + head * call.query.head)[:, None]
    inside = real[:, None] & (across[None, :] < size)
    return tl.load(at + first + across[None, :], mask=inside, other=0.0)


@triton.jit
def attend_keys(call, here, running, start, in_tree: tl.constexpr):
    """Attend to one tile of keys, from position `start` on; some may belong to a draft tree if `in_tree`."""
    query, rest, head, at, owner, numbers, stop, own = here
    summed, total, top = running
    keys = start + tl.arange(0, call.tile.keys)
    inside = keys < stop
    number = cache_rows_of(call, numbers, keys, inside)
    key = read_cached(call.key, number, owner, inside, call.tile.key_size, call.tile.key_width, query.dtype)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    if call.rest.data is not None:
        other = read_cached(call.rest, number, owner, inside, call.tile.rest_size, call.tile.rest_width, query.dtype)
        products = tl.dot(rest, tl.trans(other), products, input_precision="ieee")
    if call.key.step is not None and call.key.low is None:
        products *= read_scale(call.key, number, owner, inside)[None, :]
    key_at = keys
    if in_tree:
        key_at = tree_positions(call, own, keys, inside)
    powers, _ = logits(call, products, head[:, None], at[:, None], key_at[None, :])
    seen = inside[None, :] & (key_at[None, :] <= at[:, None])
    if call.rule.left is not None:
        seen = seen & (at[:, None] - key_at[None, :] <= call.rule.left)
    if in_tree:
        seen = seen & tree_mask(call, own, keys, inside)
    powers = tl.where(seen, powers, float("-inf"))
    highest = tl.maximum(top, tl.max(powers, 1))
    # If nothing has been visible yet, subtract 0 instead of -inf, which would give NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(powers - base[:, None])
    rescale = tl.exp2(top - base)
    total = total * rescale + tl.sum(weights, 1)
    if call.value.data is None:
        value = key
    else:
        value = read_cached(call.value, number, owner, inside, call.tile.value_size, call.tile.value_width, query.dtype)
        if call.value.step is not None and call.value.low is None:
            # The scale is applied to the weights: one multiplication per key instead of one per element of its row.
            weights *= read_scale(call.value, number, owner, inside)[None, :]
    summed = tl.dot(weights.to(value.dtype), value, summed * rescale[:, None], input_precision="ieee")
    return summed, total, highest


@triton.jit
def cache_rows_of(call, numbers, keys, inside):
    """The cache rows of keys, int64."""
    if call.page is None:
        number = tl.cast(tl.load(numbers + keys, mask=inside, other=0), tl.int64)
    else:
        number = tl.cast(tl.load(numbers + keys // call.page, mask=inside, other=0), tl.int64)
        number = number * call.page + keys % call.page
    return number


@triton.jit
def tree_positions(call, own, keys, inside):
    """The positions of keys; those of a tree are the positions of its tokens, not their slots."""
    _, request, begin = own
    since = keys - tl.load(call.bases + request)
    place = tl.load(call.positions + begin + since, mask=inside & (since >= 0), other=0).to(tl.int32)
    return tl.where(since >= 0, place, keys)


@triton.jit
def tree_mask(call, own, keys, inside):
    """The tree mask [row, key]: which keys of the tree a row sees; keys before the tree are always visible."""
    token, request, _ = own
    since = keys - tl.load(call.bases + request)
    among = inside & (since >= 0)
    number = tl.maximum(since, 0)
    at = call.seen + (tl.cast(token, tl.int64) * call.words)[:, None] + (number // 32)[None, :]
    word = tl.load(at, mask=among[None, :], other=-1)
    return ((word >> (number % 32)[None, :]) & 1) != 0


@triton.jit
def finish(call, rows, summed, total, top):
    """Write rows of the output, with zeros where no key was visible, after adding the sink to the total."""
    token, head, real = rows
    if call.rule.sinks is not None:
        sink = tl.load(call.rule.sinks + head) * LOG2_E
        highest = tl.maximum(top, sink)
        rescale = tl.exp2(top - highest)
        summed *= rescale[:, None]
        total = total * rescale + tl.exp2(sink - highest)
    across = tl.arange(0, call.tile.value_width)
    out = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    at = call.out.data + (tl.cast(token, tl.int64) * call.out.row + head * call.out.head)[:, None] + across[None, :]
    inside = real[:, None] & (across[None, :] < call.tile.value_size)
    tl.store(at, out.to(call.out.data.dtype.element_ty), mask=inside)


@triton.jit
def merge_paged(call):
    """Merge the partial outputs of each row, weighted by their lse. Grid: rows of merges, for each key/value head."""
    owners = call.heads // call.group
    row = tl.program_id(0) % call.tile.rows
    owner = tl.program_id(0) // call.tile.rows % owners
    item = call.merges + tl.program_id(0) // call.tile.rows // owners * 5
    begin, first, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    slot, slots = tl.load(item + 3), tl.load(item + 4)
    # A row that was not split has been written already.
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
            rescale, weights = tl.exp2(top - base), tl.exp2(lse - base)
            summed = summed * rescale + tl.sum(sums * weights[:, None], 0)
            total = total * rescale + tl.sum(weights, 0)
            top = highest
        place = first + row
        finish_row(call, (begin + place // call.group, owner * call.group + place % call.group), summed, total, top)


@triton.jit
def finish_row(call, row, summed, total, top):
    """Write one row of the output, like `finish`."""
    token, head = row
    if call.rule.sinks is not None:
        sink = tl.load(call.rule.sinks + head) * LOG2_E
        highest = tl.maximum(top, sink)
        rescale = tl.exp2(top - highest)
        summed *= rescale
        total = total * rescale + tl.exp2(sink - highest)
    across = tl.arange(0, call.tile.value_width)
    out = summed / tl.where(total == 0.0, 1.0, total)
    at = call.out.data + tl.cast(token, tl.int64) * call.out.row + head * call.out.head + across
    tl.store(at, out.to(call.out.data.dtype.element_ty), mask=across < call.tile.value_size)
