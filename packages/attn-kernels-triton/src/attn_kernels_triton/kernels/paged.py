"""Attention to rows in pages: some rows of queries of one request against a stretch of what it remembers.

The heads that share keys are rows of one tile, as are neighbouring tokens. A stretch that is not all of a request gives
sums and a logarithm, which are merged (Dao et al. 2023, "Flash-Decoding"; Kwon et al. 2023, arXiv 2309.06180).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.paged_rows import read_memory, read_scale
from attn_kernels_triton.kernels.scores import LOG2_E, logits


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
    numbers = call.numbers + tl.cast(request, tl.int64) * call.stride - tl.load(call.firsts + request)
    here = (query, rest, head, at, owner, numbers, stop, (token, request, begin))
    summed = tl.zeros([call.tile.rows, call.tile.value_width], tl.float32)
    total = tl.zeros([call.tile.rows], tl.float32)
    top = tl.full([call.tile.rows], float("-inf"), tl.float32)
    running = (summed, total, top)
    for step in range(tl.cdiv(stop - start, call.tile.keys)):
        running = meet(call, here, running, start + step * call.tile.keys)
    summed, total, top = running
    if slot < 0:
        finish(call, (token, head, real), summed, total, top)
    else:
        place = tl.cast(slot + owner, tl.int64) * call.tile.rows + tl.arange(0, call.tile.rows)
        across = tl.arange(0, call.tile.value_width)
        out = summed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(call.sums + place[:, None] * call.tile.value_width + across[None, :], out)
        tl.store(call.lse + place, top + tl.log2(total))


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
def meet(call, here, running, start):
    """Meet one tile of keys, from position `start` on."""
    query, rest, head, at, owner, numbers, stop, own = here
    summed, total, top = running
    keys = start + tl.arange(0, call.tile.keys)
    inside = keys < stop
    number = tl.load(numbers + keys, mask=inside, other=0)
    key = read_memory(call.key, number, owner, inside, call.tile.key_size, call.tile.key_width, query.dtype)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    if call.rest.data is not None:
        other = read_memory(call.rest, number, owner, inside, call.tile.rest_size, call.tile.rest_width, query.dtype)
        products = tl.dot(rest, tl.trans(other), products, input_precision="ieee")
    if call.key.step is not None and call.key.low is None:
        products *= read_scale(call.key, number, owner, inside)[None, :]
    key_at = keys
    if call.seen is not None:
        key_at = places_in_tree(call, own, keys, inside)
    powers, _ = logits(call, products, head[:, None], at[:, None], key_at[None, :])
    seen = inside[None, :] & (key_at[None, :] <= at[:, None])
    if call.rule.left is not None:
        seen = seen & (at[:, None] - key_at[None, :] <= call.rule.left)
    if call.seen is not None:
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
            scale = read_scale(call.value, number, owner, inside)
            value = (value.to(tl.float32) * scale[:, None]).to(query.dtype)
    summed = tl.dot(shares.to(value.dtype), value, summed * faded[:, None], input_precision="ieee")
    return summed, total, highest


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
    """Grid: merges, for each key/value head; the sums of all stretches of some rows, by their shares."""
    owners = call.heads // call.group
    owner = tl.program_id(0) % owners
    item = call.merges + tl.program_id(0) // owners * 5
    begin, first, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    slot, slots = tl.load(item + 3), tl.load(item + 4)
    across = tl.arange(0, call.tile.value_width)
    summed = tl.zeros([call.tile.rows, call.tile.value_width], tl.float32)
    total = tl.zeros([call.tile.rows], tl.float32)
    top = tl.full([call.tile.rows], float("-inf"), tl.float32)
    for step in range(slots):
        place = tl.cast(slot + step * owners + owner, tl.int64) * call.tile.rows + tl.arange(0, call.tile.rows)
        lse = tl.load(call.lse + place)
        highest = tl.maximum(top, lse)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        faded, share = tl.exp2(top - base), tl.exp2(lse - base)
        sums = tl.load(call.sums + place[:, None] * call.tile.value_width + across[None, :])
        summed = summed * faded[:, None] + sums * share[:, None]
        total = total * faded + share
        top = highest
    finish(call, rows_of(call, owner, begin, first, count), summed, total, top)
