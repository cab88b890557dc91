"""The backward program that owns keys: gradients to keys and values, summed over the query heads that share them.

No sum is shared between programs, so gradients are the same each time. Tiles lie with keys along rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.programs.rows import read, start_of, write
from attn_kernels_triton.programs.scores import hidden, logits, places_of
from attn_kernels_triton.programs.spans import listed, listed_tile, spans


@triton.jit
def gradient_to_keys(call):
    """Grid: tiles of keys, for each key/value head of each batch; writes `first` for keys and `second` for values."""
    shape, places = call.shape, call.places
    tiles = tl.cdiv(shape.keys, call.tile.keys)
    shared = shape.heads // shape.group
    block = tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // shared
    owner = tl.program_id(0) // tiles % shared
    keys = block * call.tile.keys + tl.arange(0, call.tile.keys)
    at = places_of(places.key, places.key_batch, batch, keys, shape.keys, 0)
    key = read(call.key, start_of(call.key, batch, owner), keys, shape.keys, call.tile.key_size, call.tile.key_width)
    value = read(
        call.value, start_of(call.value, batch, owner), keys, shape.keys, call.tile.value_size, call.tile.value_width
    )
    here = (key, value, batch, keys, at)
    to_key = tl.zeros([call.tile.keys, call.tile.key_width], tl.float32)
    to_value = tl.zeros([call.tile.keys, call.tile.value_width], tl.float32)
    # The heads that share these keys one after the other, all in one loop: a second one would need more registers, and
    # what is loaded ahead would stop between them.
    start, count = met(call, owner, block)
    steps = count
    if call.blocks.size is None or call.blocks.turns is None:
        steps = count * shape.group
    for step in range(steps):
        first, slot, turn = visited(call, start, count, step)
        to_key, to_value = meet(call, here, owner * shape.group + turn, (to_key, to_value), (first, slot))
    if call.rule.cap is None:
        to_key *= call.rule.scale
    write(call.first, start_of(call.first, batch, owner), keys, shape.keys, to_key, call.tile.key_size)
    write(call.second, start_of(call.second, batch, owner), keys, shape.keys, to_value, call.tile.value_size)


@triton.jit
def met(call, owner, block):
    """The first tile of queries that a tile of keys meets, and how many in a row; of a list, as steps through it."""
    if call.blocks.size is None:
        first = block * call.tile.keys - (call.shape.keys - call.shape.queries)
        reach = (call.rule.right, call.rule.left) if call.places.key is None else (None, None)
        last = first + call.tile.keys - 1
        start, _, _, stop = spans(call, first, last, reach, call.shape.queries, call.tile.queries)
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
    key, value, batch, keys, at = here
    to_key, to_value = sums
    shape, places = call.shape, call.places
    rows = there[0] + tl.arange(0, call.tile.queries)
    query = read(
        call.query, start_of(call.query, batch, head), rows, shape.queries, call.tile.key_size, call.tile.key_width
    )
    change = read(
        call.out, start_of(call.out, batch, head), rows, shape.queries, call.tile.value_size, call.tile.value_width
    )
    start = tl.cast(batch * shape.heads + head, tl.int64) * shape.queries
    lse = tl.load(call.lse + start + rows, mask=rows < shape.queries, other=float("inf"))
    # A query that sees nothing has -inf; from +inf all its weights become zero.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(call.delta + start + rows, mask=rows < shape.queries, other=0.0)
    products = tl.dot(key, tl.trans(query), input_precision="ieee")
    offset = shape.keys - shape.queries
    query_at = places_of(places.query, places.query_batch, batch, rows, shape.queries, offset)
    powers, slope = logits(call, products, head, query_at[None, :], at[:, None])
    # Keys behind the last one are not asked for: what is summed for them is never written.
    who, pairs = (batch, head, there[1]), (rows[None, :], keys[:, None])
    powers = hidden(call, powers, who, pairs, (query_at[None, :], at[:, None]))
    shares = tl.exp2(powers - lse[None, :])
    to_value = tl.dot(shares.to(change.dtype), change, to_value, input_precision="ieee")
    rise = tl.dot(value, tl.trans(change), input_precision="ieee")
    turn = shares * (rise - delta[None, :])
    if call.rule.cap is not None:
        turn *= slope
    return tl.dot(turn.to(query.dtype), query, to_key, input_precision="ieee"), to_value
