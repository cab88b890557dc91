"""The backward program that owns queries: gradients to them, scores recomputed from lse (Dao et al. 2022, arXiv
2205.14135, appendix B). Every sum has one order, so gradients are the same each time."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.dropout import kept
from attn_kernels_triton.kernels.rows import read, read_whole, start_of, write
from attn_kernels_triton.kernels.scores import hidden, logits, places_of
from attn_kernels_triton.kernels.spans import listed, listed_tile, spans
from attn_kernels_triton.kernels.texts import first_key, first_query, first_sum, keys_of, owned_queries, queries_of


@triton.jit
def attend_delta(call):
    """Σ of output times its gradient, for each query; `second` is the output, `delta` is written."""
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
    """Grid as of the forward program; writes `first`."""
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
    # A query that sees nothing has -inf; from +inf all its weights become zero.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(first_sum(call, call.delta, batch, head, text) + rows, mask=rows < queries, other=0.0)
    # Where each head has keys of its own the group is a constant, which Triton 3.6 loses inside of the loop.
    here = (query, change, lse, delta, batch, head, head // shape.group, rows, at, text)
    summed = tl.zeros([call.tile.queries, call.tile.key_width], tl.float32)
    if call.blocks.size is None:
        first = block * call.tile.queries + keys - queries
        reach = (call.rule.left, call.rule.right) if places.key is None else (None, None)
        span = spans(call, first, first + call.tile.queries - 1, reach, keys, call.tile.keys)
        summed = walk(call, here, summed, span, ask=False)
        summed = walk(call, here, summed, span, ask=True)
    else:
        row = block * call.tile.queries // call.blocks.size
        if call.blocks.heads is not None:
            row += head * call.blocks.heads
        start, stop = listed(call.blocks.partial_starts, call.blocks, row, call.tile.keys)
        summed = walk(call, here, summed, (start, stop, stop, stop), ask=True)
        start, stop = listed(call.blocks.full_starts, call.blocks, row, call.tile.keys)
        summed = walk(call, here, summed, (start, start, stop, stop), ask=False)
    if call.rule.cap is None:
        summed *= call.rule.scale
    start = first_query(call, call.first, start_of(call.first, batch, head), text)
    write(call.first, start, rows, queries, summed, call.tile.key_size)


@triton.jit
def walk(call, here, summed, span, ask: tl.constexpr):
    """Meet the whole tiles of a span or, if `ask`, those before and behind them, where each pair is asked about.

    Both ends in one loop: another one would need more registers than there are.
    """
    start, whole_start, whole_stop, stop = span
    count = whole_stop - whole_start
    if ask:
        count = whole_start - start + stop - whole_stop
    for index in range(count):
        step = whole_start + index
        if ask:
            step = start + index
            step = tl.where(step < whole_start, step, step - whole_start + whole_stop)
        slot = 0
        if call.blocks.size is None:
            tile = step
        elif ask:
            tile = listed_tile(call.blocks, call.blocks.partial, step, call.tile.keys)
            slot = tl.load(call.blocks.slots + step // (call.blocks.size // call.tile.keys))
        else:
            tile = listed_tile(call.blocks, call.blocks.full, step, call.tile.keys)
        summed = meet(call, here, summed, (tile * call.tile.keys, slot), ask)
    return summed


@triton.jit
def meet(call, here, summed, there, ask: tl.constexpr):
    """Meet one tile of keys."""
    query, change, lse, delta, batch, head, owner, rows, at, text = here
    places = call.places
    keys = there[0] + tl.arange(0, call.tile.keys)
    count = keys_of(call, text)
    start_key = first_key(call, call.key, start_of(call.key, batch, owner), text)
    start_value = first_key(call, call.value, start_of(call.value, batch, owner), text)
    if ask:
        key = read(call.key, start_key, keys, count, call.tile.key_size, call.tile.key_width)
        value = read(call.value, start_value, keys, count, call.tile.value_size, call.tile.value_width)
    else:
        key = read_whole(call.key, start_key, keys, call.tile.key_size, call.tile.key_width)
        value = read_whole(call.value, start_value, keys, call.tile.value_size, call.tile.value_width)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    key_at = places_of(places.key, places.key_batch, batch, keys, count, 0)
    powers, slope = logits(call, products, head, at[:, None], key_at[None, :])
    if ask:
        who = (batch, head, there[1], text)
        pairs, positions = (rows[:, None], keys[None, :]), (at[:, None], key_at[None, :])
        powers = tl.where(pairs[1] < count, powers, float("-inf"))
        powers = hidden(call, powers, who, pairs, positions)
    shares = tl.exp2(powers - lse[:, None])
    rise = tl.dot(change, tl.trans(value), input_precision="ieee")
    if call.dropout.state is not None:
        rise = tl.where(kept(call, (batch, head, text), rows, there[0]), rise * call.dropout.scale, 0.0)
    turn = shares * (rise - delta[:, None])
    if call.rule.cap is not None:
        turn *= slope
    return tl.dot(turn.to(key.dtype), key, summed, input_precision="ieee")
