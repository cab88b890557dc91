"""The backward program that owns keys: gradients to keys and values, summed over the query heads that share them.

No sum is shared between programs, so gradients are the same each time. Tiles lie with keys along rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.dropout import kept
from attn_kernels_triton.kernels.rows import read, start_of, write
from attn_kernels_triton.kernels.scores import hidden, logits, places_of
from attn_kernels_triton.kernels.spans import listed, listed_tile, spans
from attn_kernels_triton.kernels.texts import (
    first_key,
    first_query,
    first_sum,
    keys_of,
    owned_keys,
    queries_of,
)


@triton.jit
def gradient_to_keys(call):
    """Grid: tiles of keys, for each key/value head of each batch; writes `first` for keys and `second` for values."""
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
    # The heads that share these keys one after the other, all in one loop: a second one would need more registers, and
    # what is loaded ahead would stop between them.
    start, in_a_row = met(call, owner, block, text)
    steps = in_a_row
    if call.blocks.size is None or call.blocks.turns is None:
        steps = in_a_row * shape.group
    for step in range(steps):
        first, slot, turn = visited(call, start, in_a_row, step)
        to_key, to_value = meet(
            call, here, owner * shape.group + turn, (to_key, to_value), (first, slot, block * call.tile.keys)
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
def met(call, owner, block, text):
    """The first tile of queries that a tile of keys meets, and how many in a row; of a list, as steps through it."""
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
def visited(call, start, count, step):
    """The first query of the tile of a step, the slot of its bits, and the turn of which head it is."""
    if call.blocks.size is None:
        turn = step // count
        first = (start + step - turn * count) * call.tile.queries
        slot = 0
    else:
        turn = step // count
        within = start + step - turn * count
        several = call.blocks.size // call.tile.queries
        first = listed_tile(call.blocks, call.blocks.partial, within, call.tile.queries) * call.tile.queries
        slot = tl.load(call.blocks.slots + within // several)
        if call.blocks.turns is not None:
            turn = tl.load(call.blocks.turns + within // several)
    return first, slot, turn


@triton.jit
def meet(call, here, head, sums, there):
    """Meet one tile of queries of a head."""
    key, value, batch, keys, at, text = here
    to_key, to_value = sums
    places, queries = call.places, queries_of(call, text)
    rows = there[0] + tl.arange(0, call.tile.queries)
    start = first_query(call, call.query, start_of(call.query, batch, head), text)
    query = read(call.query, start, rows, queries, call.tile.key_size, call.tile.key_width)
    start = first_query(call, call.out, start_of(call.out, batch, head), text)
    change = read(call.out, start, rows, queries, call.tile.value_size, call.tile.value_width)
    lse = tl.load(first_sum(call, call.lse, batch, head, text) + rows, mask=rows < queries, other=float("inf"))
    # A query that sees nothing has -inf; from +inf all its weights become zero.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(first_sum(call, call.delta, batch, head, text) + rows, mask=rows < queries, other=0.0)
    products = tl.dot(key, tl.trans(query), input_precision="ieee")
    offset = keys_of(call, text) - queries
    query_at = places_of(places.query, places.query_batch, batch, rows, queries, offset)
    powers, slope = logits(call, products, head, query_at[None, :], at[:, None])
    # Keys behind the last one are not asked for: what is summed for them is never written.
    who, pairs = (batch, head, there[1], text), (rows[None, :], keys[:, None])
    powers = hidden(call, powers, who, pairs, (query_at[None, :], at[:, None]))
    shares = tl.exp2(powers - lse[None, :])
    left = shares
    if call.dropout.state is not None:
        stays = tl.trans(kept(call, (batch, head, text), rows, there[2]).to(tl.int8)) != 0
        left = tl.where(stays, shares, 0.0)
    to_value = tl.dot(left.to(change.dtype), change, to_value, input_precision="ieee")
    rise = tl.dot(value, tl.trans(change), input_precision="ieee")
    if call.dropout.state is not None:
        rise = tl.where(stays, rise * call.dropout.scale, 0.0)
    turn = shares * (rise - delta[None, :])
    if call.rule.cap is not None:
        turn *= slope
    return tl.dot(turn.to(query.dtype), query, to_key, input_precision="ieee"), to_value
