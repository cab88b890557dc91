"""Backward programs whose tiles are fetched by the chip's own copier (TMA), for masks that are bands.

As of `backward_key` and `backward_query`, for the calls that `dense` computes. Products of one tile are asked for
before what hangs on them is needed, so that the matrix unit works on one while exponentials of another are taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.backward_key import met
from attn_kernels_triton.kernels.rows import read, start_of, write
from attn_kernels_triton.kernels.scores import LOG2_E
from attn_kernels_triton.kernels.spans import spans
from attn_kernels_triton.kernels.texts import owned_keys, owned_queries

NEVER = tl.constexpr(2**31 - 1)
"""A query that there is not."""


@triton.jit
def pad(call):
    """Grid as of the forward program; writes `delta` and `padded` from lse, the output `second` and its gradient."""
    batch, head, block, _ = owned_queries(call)
    queries = call.shape.queries
    rows = block * call.tile.queries + tl.arange(0, call.tile.queries)
    start = start_of(call.second, batch, head)
    out = read(call.second, start, rows, queries, call.tile.value_size, call.tile.value_width).to(tl.float32)
    start = start_of(call.out, batch, head)
    change = read(call.out, start, rows, queries, call.tile.value_size, call.tile.value_width).to(tl.float32)
    number = tl.cast(batch * call.shape.heads + head, tl.int64)
    lse = tl.load(call.lse + number * queries + rows, mask=rows < queries, other=float("inf"))
    # A query that sees nothing has -inf; from +inf all its weights become zero.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(call.padded.lse + number * call.padded.rows + rows, lse)
    delta = tl.sum(out * change, 1)
    tl.store(call.padded.delta + number * call.padded.rows + rows, delta)
    tl.store(call.delta + number * queries + rows, delta, mask=rows < queries)


@triton.jit
def gradient_to_dense_keys(call, queries, changes, lse, delta, keys, values):
    """Grid and results as of `gradient_to_keys`; the others are descriptors of tiles of [batch, head, row, size], and
    of lines of [head of all batches, row]."""
    shape = call.shape
    batch, owner, block, text = owned_keys(call)
    first = block * call.tile.keys
    key = tile_at(keys, (batch, owner, first), call.tile.keys, call.tile.key_width)
    value = tile_at(values, (batch, owner, first), call.tile.keys, call.tile.value_width)
    to_key = tl.zeros([call.tile.keys, call.tile.key_width], tl.float32)
    to_value = tl.zeros([call.tile.keys, call.tile.value_width], tl.float32)
    start, in_a_row = met(call, owner, block, text)
    # Numbers that are 1 are constants, which Triton 3.6 loses inside of the loop.
    first_head = owner * shape.group
    first_line = batch * shape.heads + first_head
    # The heads that share these keys one after the other, all in one loop, so that what is loaded ahead never stops.
    for step in range(in_a_row * shape.group):
        turn = step // in_a_row
        place = batch, first_head + turn, (start + step - turn * in_a_row) * call.tile.queries
        query = tile_at(queries, place, call.tile.queries, call.tile.key_width)
        change = tile_at(changes, place, call.tile.queries, call.tile.value_width)
        shares = shares_of(
            call, (key, query), place, (first, line_at(lse, call, first_line + turn, place[2])), ragged=False
        )
        to_value = tl.dot(shares.to(change.dtype), change, to_value)
        # What is subtracted is where the sum begins: it need not be held beside it.
        below = (
            tl.zeros([call.tile.keys, call.tile.queries], tl.float32)
            - line_at(delta, call, first_line + turn, place[2])[None, :]
        )
        rise = tl.dot(value, tl.trans(change), below)
        to_key = tl.dot((shares * rise).to(query.dtype), query, to_key)
    rows = first + tl.arange(0, call.tile.keys)
    to_key *= call.rule.scale
    write(call.first, start_of(call.first, batch, owner), rows, shape.keys, to_key, call.tile.key_size)
    write(call.second, start_of(call.second, batch, owner), rows, shape.keys, to_value, call.tile.value_size)


@triton.jit
def tile_at(tiles, place, rows: tl.constexpr, width: tl.constexpr):
    """A tile [rows, width] of a batch and head, from a row on."""
    return tl.reshape(tiles.load([place[0], place[1], place[2], 0]), (rows, width))


@triton.jit
def line_at(sums, call, number, row):
    """Numbers of a tile of queries from a row on, of sums [head of all batches, row]."""
    return tl.reshape(sums.load([number, row]), (call.tile.queries,))


@triton.jit
def shares_of(call, tiles, place, here, ragged: tl.constexpr):
    """Weights [key, query] of a tile of keys, from row `here[0]` on, and one of queries, at a place, with its lse.

    Keys behind the last one are asked for only where tiles are `ragged`: else what is summed for them is not written.
    """
    shape = call.shape
    products = tl.dot(tiles[0], tl.trans(tiles[1]))
    # Counted anew for each tile: as constants of the loop they would take registers.
    column = (place[2] + tl.arange(0, call.tile.queries))[None, :]
    keys = here[0] + tl.arange(0, call.tile.keys)
    at = keys - (shape.keys - shape.queries)
    if call.rule.right is not None or ragged:
        first = tl.zeros_like(at) if call.rule.right is None else at - call.rule.right
        if ragged:
            first = tl.where(keys < shape.keys, first, NEVER)
        products = tl.where(column >= first[:, None], products, float("-inf"))
    if call.rule.left is not None:
        products = tl.where(column <= (at + call.rule.left)[:, None], products, float("-inf"))
    return tl.exp2(products * (call.rule.scale * LOG2_E) - here[1][None, :])


@triton.jit
def gradient_to_dense_queries(call, queries, changes, lse, delta, keys, values):
    """Grid and results as of `gradient_to_queries`; the others as of `gradient_to_dense_keys`."""
    shape = call.shape
    batch, head, block, _ = owned_queries(call)
    place = batch, head, block * call.tile.queries
    query = tile_at(queries, place, call.tile.queries, call.tile.key_width)
    change = tile_at(changes, place, call.tile.queries, call.tile.value_width)
    rows = place[2] + tl.arange(0, call.tile.queries)
    number = batch * shape.heads + head
    sums = line_at(lse, call, number, place[2]), line_at(delta, call, number, place[2])
    here = (query, change, sums[0], sums[1], rows + shape.keys - shape.queries)
    first = place[2] + shape.keys - shape.queries
    span = spans(
        call, first, first + call.tile.queries - 1, (call.rule.left, call.rule.right), shape.keys, call.tile.keys
    )
    start, whole_start, whole_stop, stop = span
    owner = head // shape.group
    summed = tl.zeros([call.tile.queries, call.tile.key_width], tl.float32)
    for step in range(whole_start, whole_stop):
        there = batch, owner, step * call.tile.keys
        key = tile_at(keys, there, call.tile.keys, call.tile.key_width)
        value = tile_at(values, there, call.tile.keys, call.tile.value_width)
        summed = meet(call, here, (key, value, there[2]), summed, ask=False)
    # Both ends in one loop: another one would need more registers than there are.
    for index in range(whole_start - start + stop - whole_stop):
        step = start + index
        step = tl.where(step < whole_start, step, step - whole_start + whole_stop)
        there = batch, owner, step * call.tile.keys
        key = tile_at(keys, there, call.tile.keys, call.tile.key_width)
        value = tile_at(values, there, call.tile.keys, call.tile.value_width)
        summed = meet(call, here, (key, value, there[2]), summed, ask=True)
    start_query = start_of(call.first, batch, head)
    write(call.first, start_query, rows, shape.queries, summed * call.rule.scale, call.tile.key_size)


@triton.jit
def meet(call, here, there, summed, ask: tl.constexpr):
    """Meet one tile of keys; its pairs are asked about if `ask`."""
    query, change, lse, delta, at = here
    key, value, first = there
    products = tl.dot(query, tl.trans(key))
    rise = tl.dot(change, tl.trans(value))
    if ask:
        column = tl.arange(0, call.tile.keys)[None, :]
        last = tl.zeros_like(at) + call.shape.keys - 1
        if call.rule.right is not None:
            last = tl.minimum(at + call.rule.right, last)
        products = tl.where(column <= (last - first)[:, None], products, float("-inf"))
        if call.rule.left is not None:
            products = tl.where(column >= (at - call.rule.left - first)[:, None], products, float("-inf"))
    shares = tl.exp2(products * (call.rule.scale * LOG2_E) - lse[:, None])
    changed = shares * (rise - delta[:, None])
    return tl.dot(changed.to(key.dtype), key, summed)
