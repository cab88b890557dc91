"""The forward kernels of attention: one tile of queries against the keys that it sees; scores are never stored.

Online softmax to the base 2 (Milakov & Gimelshein 2018; Dao 2023, arXiv 2307.08691, algorithm 1). `attend_forward`
reads tiles by pointers and takes every mask, `attend_dense` reads them by TMA and takes bands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.common import (
    LOG2_E,
    apply_mask,
    dropout_mask,
    first_key,
    first_query,
    first_sum,
    keys_of,
    listed,
    listed_tile,
    logits,
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
def attend_forward(call):
    """The forward pass by pointers. Grid: tiles of queries, for each head of each batch; see `owned_queries`."""
    batch, head, block, text = owned_queries(call)
    queries, keys = queries_of(call, text), keys_of(call, text)
    rows = block * call.tile.queries + tl.arange(0, call.tile.queries)
    places = call.places
    at = places_of(places.query, places.query_batch, batch, rows, queries, keys - queries)
    start_query = first_query(call, call.query, start_of(call.query, batch, head), text)
    query = read(call.query, start_query, rows, queries, call.tile.key_size, call.tile.key_width)
    here = (query, batch, head, rows, at, text, head // call.shape.group)
    running = initial_sums(call, head)
    if call.blocks.size is None:
        first = block * call.tile.queries + keys - queries
        reach = (call.rule.left, call.rule.right) if places.key is None else (None, None)
        span = spans(call, first, first + call.tile.queries - 1, reach, keys, call.tile.keys)
        running = walk(call, here, running, span, masked=False)
        running = walk(call, here, running, span, masked=True)
    else:
        row = block * call.tile.queries // call.blocks.size
        if call.blocks.heads is not None:
            row += head * call.blocks.heads
        start, stop = listed(call.blocks.partial_starts, call.blocks, row, call.tile.keys)
        running = walk(call, here, running, (start, stop, stop, stop), masked=True)
        start, stop = listed(call.blocks.full_starts, call.blocks, row, call.tile.keys)
        running = walk(call, here, running, (start, start, stop, stop), masked=False)
    finish(call, (batch, head, block, text), running)


@triton.jit
def initial_sums(call, head):
    """The initial accumulator, total and maximum of the online softmax, which contain the sink alone."""
    total = tl.zeros([call.tile.queries], tl.float32)
    top = tl.full([call.tile.queries], float("-inf"), tl.float32)
    if call.rule.sinks is not None:
        total += 1.0
        top = tl.zeros([call.tile.queries], tl.float32) + tl.load(call.rule.sinks + head) * LOG2_E
    return tl.zeros([call.tile.queries, call.tile.value_width], tl.float32), total, top


@triton.jit
def walk(call, here, running, span, masked: tl.constexpr):
    """Attend to the unmasked tiles of a span or, if `masked`, to those before and behind them, with mask checks.

    Both ends share one loop: a second one would need too many registers.
    """
    summed, total, top = running
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
        summed, total, top = attend_tile(call, here, (summed, total, top), (tile * call.tile.keys, slot), masked)
    return summed, total, top


@triton.jit
def attend_tile(call, here, running, there, masked: tl.constexpr):
    """Attend to one tile of keys; pairs are checked against the mask if `masked`."""
    query, batch, head, rows, at, text, owner = here
    summed, total, top = running
    places = call.places
    keys = there[0] + tl.arange(0, call.tile.keys)
    count = keys_of(call, text)
    start_key = first_key(call, call.key, start_of(call.key, batch, owner), text)
    start_value = first_key(call, call.value, start_of(call.value, batch, owner), text)
    if masked:
        key = read(call.key, start_key, keys, count, call.tile.key_size, call.tile.key_width)
    else:
        key = read_whole(call.key, start_key, keys, call.tile.key_size, call.tile.key_width)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    key_at = places_of(places.key, places.key_batch, batch, keys, count, 0)
    powers, _ = logits(call, products, head, at[:, None], key_at[None, :])
    if masked:
        who = (batch, head, there[1], text)
        pairs, positions = (rows[:, None], keys[None, :]), (at[:, None], key_at[None, :])
        powers = tl.where(pairs[1] < count, powers, float("-inf"))
        powers = apply_mask(call, powers, who, pairs, positions)
    highest = tl.maximum(top, tl.max(powers, 1))
    # If nothing has been visible yet, subtract 0 instead of -inf, which would give NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(powers - base[:, None])
    rescale = tl.exp2(top - base)
    total = total * rescale + tl.sum(weights, 1)
    if call.dropout.state is not None:
        weights = tl.where(dropout_mask(call, (batch, head, text), rows, there[0]), weights, 0.0)
    if masked:
        value = read(call.value, start_value, keys, count, call.tile.value_size, call.tile.value_width)
    else:
        value = read_whole(call.value, start_value, keys, call.tile.value_size, call.tile.value_width)
    summed = tl.dot(weights.to(value.dtype), value, summed * rescale[:, None], input_precision="ieee")
    return summed, total, highest


@triton.jit
def finish(call, place, running):
    """Write the output, with zeros for queries that saw no key, and lse."""
    batch, head, block, text = place
    summed, total, top = running
    queries = queries_of(call, text)
    rows = block * call.tile.queries + tl.arange(0, call.tile.queries)
    out = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    if call.dropout.state is not None:
        out *= call.dropout.scale
    start = first_query(call, call.out, start_of(call.out, batch, head), text)
    write(call.out, start, rows, queries, out, call.tile.value_size)
    if call.lse is not None:
        start = first_sum(call, call.lse, batch, head, text)
        tl.store(start + rows, top + tl.log2(total), mask=rows < queries)


@triton.jit
def attend_dense(call, queries, keys, values):
    """The forward pass by TMA. Grid as in `attend_forward`; the other arguments are descriptors of tiles of [batch,
    head, row, size]."""
    shape = call.shape
    batch, head, block, text = owned_queries(call)
    query = tl.reshape(
        queries.load([batch, head, block * call.tile.queries, 0]), (call.tile.queries, call.tile.key_width)
    )
    first = block * call.tile.queries + shape.keys - shape.queries
    span = spans(
        call, first, first + call.tile.queries - 1, (call.rule.left, call.rule.right), shape.keys, call.tile.keys
    )
    start, whole_start, whole_stop, stop = span
    running = initial_sums(call, head)
    owner = head // shape.group
    for step in range(whole_start, whole_stop):
        key, value = load_tiles(call, keys, values, (batch, owner, step * call.tile.keys))
        running = attend_dense_tile(call, (query, block), (key, value, step), running, masked=False)
    # Both ends share one loop: a second one would need too many registers.
    for index in range(whole_start - start + stop - whole_stop):
        step = start + index
        step = tl.where(step < whole_start, step, step - whole_start + whole_stop)
        key, value = load_tiles(call, keys, values, (batch, owner, step * call.tile.keys))
        running = attend_dense_tile(call, (query, block), (key, value, step), running, masked=True)
    finish(call, (batch, head, block, text), running)


@triton.jit
def load_tiles(call, keys, values, place):
    """Load a tile of keys and one of values."""
    batch, owner, row = place
    key = tl.reshape(keys.load([batch, owner, row, 0]), (call.tile.keys, call.tile.key_width))
    value = tl.reshape(values.load([batch, owner, row, 0]), (call.tile.keys, call.tile.value_width))
    return key, value


@triton.jit
def attend_dense_tile(call, here, there, running, masked: tl.constexpr):
    """Attend to one tile of keys; pairs are checked against the mask if `masked`."""
    query, block = here
    key, value, step = there
    summed, total, top = running
    products = tl.dot(query, tl.trans(key))
    if masked:
        products = apply_band(call, products, block, step)
    scale = call.rule.scale * LOG2_E
    highest = tl.maximum(top, tl.max(products, 1) * scale)
    base = highest
    if masked:
        # If nothing has been visible yet, subtract 0 instead of -inf, which would give NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(products * scale - base[:, None])
    rescale = tl.exp2(top - base)
    summed = tl.dot(weights.to(value.dtype), value, summed * rescale[:, None])
    return summed, total * rescale + tl.sum(weights, 1), highest


@triton.jit
def apply_band(call, products, block, step):
    """The products with -inf where a query does not see a key: each pair is compared with the bounds of its row."""
    shape = call.shape
    column = tl.arange(0, call.tile.keys)[None, :]
    at = block * call.tile.queries + tl.arange(0, call.tile.queries) + shape.keys - shape.queries
    last = tl.zeros_like(at) + shape.keys - 1
    if call.rule.right is not None:
        last = tl.minimum(at + call.rule.right, last)
    products = tl.where(column <= (last - step * call.tile.keys)[:, None], products, float("-inf"))
    if call.rule.left is not None:
        first = at - call.rule.left - step * call.tile.keys
        products = tl.where(column >= first[:, None], products, float("-inf"))
    return products
