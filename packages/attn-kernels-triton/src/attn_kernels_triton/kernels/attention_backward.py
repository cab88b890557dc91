"""The backward kernels of attention that read tiles by pointers: one owns queries, the other keys.

Weights are recomputed from lse (Dao et al. 2022, arXiv 2205.14135, appendix B). Sums always have the same order, so
gradients are deterministic, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.common import (
    apply_mask,
    dropout_mask,
    first_key,
    first_query,
    first_sum,
    keys_of,
    listed,
    listed_tile,
    logits,
    owned_keys,
    owned_queries,
    places_of,
    queries_of,
    read,
    read_whole,
    spans,
    start_of,
    write,
)


@triton.jit
def attend_delta(call):
    """Write `delta`, the sum of output times its gradient for each query; `second` is the output."""
    batch, head, block, text = owned_queries(call)
    queries = queries_of(call, text)
    rows = block * call.tile.queries + tl.arange(0, call.tile.queries)
    start = first_query(call, call.second, start_of(call.second, batch, head), text)
    out = read(call.second, start, rows, queries, call.tile.value_size, call.tile.value_width)
    start = first_query(call, call.out, start_of(call.out, batch, head), text)
    change = read(call.out, start, rows, queries, call.tile.value_size, call.tile.value_width)
    out, change = out.to(tl.float32), change.to(tl.float32)
    tl.store(first_sum(call, call.delta, batch, head, text) + rows, tl.sum(out * change, 1), mask=rows < queries)


@triton.jit
def gradient_to_queries(call):
    """Write `first`, the gradient of queries. Grid as in the forward kernel."""
    shape, places = call.shape, call.places
    batch, head, block, text = owned_queries(call)
    queries, keys = queries_of(call, text), keys_of(call, text)
    rows = block * call.tile.queries + tl.arange(0, call.tile.queries)
    at = places_of(places.query, places.query_batch, batch, rows, queries, keys - queries)
    start = first_query(call, call.query, start_of(call.query, batch, head), text)
    query = read(call.query, start, rows, queries, call.tile.key_size, call.tile.key_width)
    start = first_query(call, call.out, start_of(call.out, batch, head), text)
    change = read(call.out, start, rows, queries, call.tile.value_size, call.tile.value_width)
    lse = tl.load(first_sum(call, call.lse, batch, head, text) + rows, mask=rows < queries, other=float("inf"))
    # A query that sees nothing has lse -inf; +inf instead makes all its weights zero.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(first_sum(call, call.delta, batch, head, text) + rows, mask=rows < queries, other=0.0)
    # Divided outside of the loop: a group of 1 is a constant, which Triton 3.6 loses inside loops.
    here = (query, change, lse, delta, batch, head, head // shape.group, rows, at, text)
    summed = tl.zeros([call.tile.queries, call.tile.key_width], tl.float32)
    if call.blocks.size is None:
        first = block * call.tile.queries + keys - queries
        reach = (call.rule.left, call.rule.right) if places.key is None else (None, None)
        span = spans(call, first, first + call.tile.queries - 1, reach, keys, call.tile.keys)
        summed = walk(call, here, summed, span, masked=False)
        summed = walk(call, here, summed, span, masked=True)
    else:
        row = block * call.tile.queries // call.blocks.size
        if call.blocks.heads is not None:
            row += head * call.blocks.heads
        start, stop = listed(call.blocks.partial_starts, call.blocks, row, call.tile.keys)
        summed = walk(call, here, summed, (start, stop, stop, stop), masked=True)
        start, stop = listed(call.blocks.full_starts, call.blocks, row, call.tile.keys)
        summed = walk(call, here, summed, (start, start, stop, stop), masked=False)
    if call.rule.cap is None:
        summed *= call.rule.scale
    start = first_query(call, call.first, start_of(call.first, batch, head), text)
    write(call.first, start, rows, queries, summed, call.tile.key_size)


@triton.jit
def walk(call, here, summed, span, masked: tl.constexpr):
    """Add the gradients from the unmasked tiles of a span or, if `masked`, from those before and behind them, with mask
    checks.

    Both ends share one loop: a second one would need too many registers.
    """
    start, whole_start, whole_stop, stop = span
    count = whole_stop - whole_start
    if masked:
        count = whole_start - start + stop - whole_stop
    for index in range(count):
        step = whole_start + index
        if masked:
            step = start + index
            step = tl.where(step < whole_start, step, step - whole_start + whole_stop)
        slot = 0
        if call.blocks.size is None:
            tile = step
        elif masked:
            tile = listed_tile(call.blocks, call.blocks.partial, step, call.tile.keys)
            slot = tl.load(call.blocks.slots + step // (call.blocks.size // call.tile.keys))
        else:
            tile = listed_tile(call.blocks, call.blocks.full, step, call.tile.keys)
        summed = add_query_gradient(call, here, summed, (tile * call.tile.keys, slot), masked)
    return summed


@triton.jit
def add_query_gradient(call, here, summed, there, masked: tl.constexpr):
    """Add the gradient of queries from one tile of keys."""
    query, change, lse, delta, batch, head, owner, rows, at, text = here
    places = call.places
    keys = there[0] + tl.arange(0, call.tile.keys)
    count = keys_of(call, text)
    start_key = first_key(call, call.key, start_of(call.key, batch, owner), text)
    start_value = first_key(call, call.value, start_of(call.value, batch, owner), text)
    if masked:
        key = read(call.key, start_key, keys, count, call.tile.key_size, call.tile.key_width)
        value = read(call.value, start_value, keys, count, call.tile.value_size, call.tile.value_width)
    else:
        key = read_whole(call.key, start_key, keys, call.tile.key_size, call.tile.key_width)
        value = read_whole(call.value, start_value, keys, call.tile.value_size, call.tile.value_width)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    key_at = places_of(places.key, places.key_batch, batch, keys, count, 0)
    powers, slope = logits(call, products, head, at[:, None], key_at[None, :])
    if masked:
        who = (batch, head, there[1], text)
        pairs, positions = (rows[:, None], keys[None, :]), (at[:, None], key_at[None, :])
        powers = tl.where(pairs[1] < count, powers, float("-inf"))
        powers = apply_mask(call, powers, who, pairs, positions)
    weights = tl.exp2(powers - lse[:, None])
    dp = tl.dot(change, tl.trans(value), input_precision="ieee")
    if call.dropout.state is not None:
        dp = tl.where(dropout_mask(call, (batch, head, text), rows, there[0]), dp * call.dropout.scale, 0.0)
    ds = weights * (dp - delta[:, None])
    if call.rule.cap is not None:
        ds *= slope
    return tl.dot(ds.to(key.dtype), key, summed, input_precision="ieee")


@triton.jit
def gradient_to_keys(call):
    """Write the gradients of keys (`first`) and values (`second`). Grid: tiles of keys, for each key/value head of each
    batch."""
    shape, places = call.shape, call.places
    batch, owner, block, text = owned_keys(call)
    count = keys_of(call, text)
    keys = block * call.tile.keys + tl.arange(0, call.tile.keys)
    at = places_of(places.key, places.key_batch, batch, keys, count, 0)
    start_key = first_key(call, call.key, start_of(call.key, batch, owner), text)
    key = read(call.key, start_key, keys, count, call.tile.key_size, call.tile.key_width)
    start_value = first_key(call, call.value, start_of(call.value, batch, owner), text)
    value = read(call.value, start_value, keys, count, call.tile.value_size, call.tile.value_width)
    here = (key, value, batch, keys, at, text)
    to_key = tl.zeros([call.tile.keys, call.tile.key_width], tl.float32)
    to_value = tl.zeros([call.tile.keys, call.tile.value_width], tl.float32)
    # All heads that share these keys are processed in one loop: a nested one would need more registers and would
    # interrupt the software pipeline between heads.
    start, in_a_row = query_tiles_of(call, owner, block, text)
    steps = in_a_row
    if call.blocks.size is None or call.blocks.group_heads is None:
        steps = in_a_row * shape.group
    for step in range(steps):
        first, slot, group_head = query_tile_of(call, start, in_a_row, step)
        to_key, to_value = add_key_gradients(
            call, here, owner * shape.group + group_head, (to_key, to_value), (first, slot, block * call.tile.keys)
        )
    if call.rule.cap is None:
        to_key *= call.rule.scale
    if call.dropout.state is not None:
        to_value *= call.dropout.scale
    start_key = first_key(call, call.first, start_of(call.first, batch, owner), text)
    write(call.first, start_key, keys, count, to_key, call.tile.key_size)
    start_value = first_key(call, call.second, start_of(call.second, batch, owner), text)
    write(call.second, start_value, keys, count, to_value, call.tile.value_size)


@triton.jit
def query_tiles_of(call, owner, block, text):
    """The first query tile that attends to a tile of keys, and how many do; with block lists, steps through them."""
    if call.blocks.size is None:
        queries = queries_of(call, text)
        first = block * call.tile.keys - (keys_of(call, text) - queries)
        reach = (call.rule.right, call.rule.left) if call.places.key is None else (None, None)
        last = first + call.tile.keys - 1
        start, _, _, stop = spans(call, first, last, reach, queries, call.tile.queries)
    else:
        row = block * call.tile.keys // call.blocks.size
        if call.blocks.heads is not None:
            row += owner * call.blocks.heads
        start, stop = listed(call.blocks.partial_starts, call.blocks, row, call.tile.queries)
    return start, stop - start


@triton.jit
def query_tile_of(call, start, count, step):
    """The first query of the tile of a step, the slot of its bits, and the index of its head within the group."""
    if call.blocks.size is None:
        group_head = step // count
        first = (start + step - group_head * count) * call.tile.queries
        slot = 0
    else:
        group_head = step // count
        place = start + step - group_head * count
        several = call.blocks.size // call.tile.queries
        first = listed_tile(call.blocks, call.blocks.partial, place, call.tile.queries) * call.tile.queries
        slot = tl.load(call.blocks.slots + place // several)
        if call.blocks.group_heads is not None:
            group_head = tl.load(call.blocks.group_heads + place // several)
    return first, slot, group_head


@triton.jit
def add_key_gradients(call, here, head, sums, there):
    """Add the gradients of keys and values from one tile of queries of a head."""
    key, value, batch, keys, at, text = here
    to_key, to_value = sums
    places, queries = call.places, queries_of(call, text)
    rows = there[0] + tl.arange(0, call.tile.queries)
    start = first_query(call, call.query, start_of(call.query, batch, head), text)
    query = read(call.query, start, rows, queries, call.tile.key_size, call.tile.key_width)
    start = first_query(call, call.out, start_of(call.out, batch, head), text)
    change = read(call.out, start, rows, queries, call.tile.value_size, call.tile.value_width)
    lse = tl.load(first_sum(call, call.lse, batch, head, text) + rows, mask=rows < queries, other=float("inf"))
    # A query that sees nothing has lse -inf; +inf instead makes all its weights zero.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(first_sum(call, call.delta, batch, head, text) + rows, mask=rows < queries, other=0.0)
    products = tl.dot(key, tl.trans(query), input_precision="ieee")
    offset = keys_of(call, text) - queries
    query_at = places_of(places.query, places.query_batch, batch, rows, queries, offset)
    powers, slope = logits(call, products, head, query_at[None, :], at[:, None])
    # Keys behind the last one need no mask: their sums are never written.
    who, pairs = (batch, head, there[1], text), (rows[None, :], keys[:, None])
    powers = apply_mask(call, powers, who, pairs, (query_at[None, :], at[:, None]))
    weights = tl.exp2(powers - lse[None, :])
    kept_weights = weights
    if call.dropout.state is not None:
        stays = tl.trans(dropout_mask(call, (batch, head, text), rows, there[2]).to(tl.int8)) != 0
        kept_weights = tl.where(stays, weights, 0.0)
    to_value = tl.dot(kept_weights.to(change.dtype), change, to_value, input_precision="ieee")
    dp = tl.dot(value, tl.trans(change), input_precision="ieee")
    if call.dropout.state is not None:
        dp = tl.where(stays, dp * call.dropout.scale, 0.0)
    ds = weights * (dp - delta[None, :])
    if call.rule.cap is not None:
        ds *= slope
    return tl.dot(ds.to(query.dtype), query, to_key, input_precision="ieee"), to_value
