"""All three gradients of a band in one program, from five products of each pair of tiles in place of seven.

A program owns a tile of keys, and adds what it gives to queries to sums in memory, of which there are several parts:
programs that run at the same time add to parts of their own, and those of the next launch follow. So additions have one
order, and with it each gradient is the same every time; in the end the parts are added in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.backward_key import met
from attn_kernels_triton.kernels.dense_backward import line_at, shares_of, tile_at
from attn_kernels_triton.kernels.rows import start_of, write
from attn_kernels_triton.kernels.texts import owned_queries


@triton.jit
def gradients_joined(call, queries, changes, lse, delta, keys, values):
    """Grid: parts, for each key/value head of each batch; writes `first` for keys, `second` for values and adds to
    `parts`; the others are descriptors of tiles of [batch, head, row, size]."""
    shape = call.shape
    # Known to the compiler, a group of one costs more registers than wide heads leave.
    group = tl.load(call.parts.first + 1)
    shared = shape.heads // group
    part = tl.program_id(0) % call.parts.count
    batch = tl.program_id(0) // call.parts.count // shared
    owner = tl.program_id(0) // call.parts.count % shared
    text = (part, part, part, part, part)
    block = tl.load(call.parts.first) + part
    first = block * call.tile.keys
    key = tile_at(keys, (batch, owner, first), call.tile.keys, call.tile.key_width)
    value = tile_at(values, (batch, owner, first), call.tile.keys, call.tile.value_width)
    to_key = tl.zeros([call.tile.keys, call.tile.key_width], tl.float32)
    to_value = tl.zeros([call.tile.keys, call.tile.value_width], tl.float32)
    start, in_a_row = met(call, owner, block, text)
    # Behind the last tile there are no keys.
    in_a_row = tl.where(first < shape.keys, in_a_row, 0)
    # Numbers that are 1 are constants, which Triton 3.6 loses inside of the loop, and so are others.
    first_head = owner * group
    first_line = batch * shape.heads + first_head
    ragged: tl.constexpr = call.parts.ragged is not None
    turn, tile = 0, start
    for _ in range(in_a_row * group):
        place = batch, first_head + turn, tile * call.tile.queries
        query = tile_at(queries, place, call.tile.queries, call.tile.key_width)
        change = tile_at(changes, place, call.tile.queries, call.tile.value_width)
        shares = shares_of(call, (key, query), place, (first, line_at(lse, call, first_line + turn, place[2])), ragged)
        to_value = tl.dot(shares.to(change.dtype), change, to_value)
        # What is subtracted is where the sum begins: it need not be held beside it.
        below = (
            tl.zeros([call.tile.keys, call.tile.queries], tl.float32)
            - line_at(delta, call, first_line + turn, place[2])[None, :]
        )
        rise = tl.dot(value, tl.trans(change), below)
        changed = (shares * rise).to(query.dtype)
        to_key = tl.dot(changed, query, to_key)
        tl.atomic_add(sums_at(call, part, first_line + turn, place[2]), tl.dot(tl.trans(changed), key), sem="relaxed")
        tile += 1
        last = tile == start + in_a_row
        turn += last.to(tl.int32)
        tile = tl.where(last, start, tile)
    rows = first + tl.arange(0, call.tile.keys)
    to_key *= call.rule.scale
    write(call.first, start_of(call.first, batch, owner), rows, shape.keys, to_key, call.tile.key_size)
    write(call.second, start_of(call.second, batch, owner), rows, shape.keys, to_value, call.tile.value_size)


@triton.jit
def sums_at(call, part, line, row):
    """Where the sums lie of a tile of queries from a row on, of a part and head; there is room for whole tiles."""
    number = tl.cast(part, tl.int64) * call.parts.heads + line
    start = call.parts.sums + (number * call.padded.rows + row) * call.tile.key_width
    across = tl.arange(0, call.tile.key_width)
    return start + (tl.arange(0, call.tile.queries)[:, None] * call.tile.key_width + across[None, :])


@triton.jit
def join(call):
    """Grid as of the forward program; writes `first`, the gradient to queries."""
    batch, head, block, _ = owned_queries(call)
    line, row = batch * call.shape.heads + head, block * call.tile.queries
    summed = tl.zeros([call.tile.queries, call.tile.key_width], tl.float32)
    for part in range(call.parts.count):
        summed += tl.load(sums_at(call, part, line, row))
    rows = row + tl.arange(0, call.tile.queries)
    start = start_of(call.first, batch, head)
    write(call.first, start, rows, call.shape.queries, summed * call.rule.scale, call.tile.key_size)
