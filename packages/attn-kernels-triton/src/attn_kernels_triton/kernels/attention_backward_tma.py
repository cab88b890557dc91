"""The backward kernels of attention that read tiles by TMA, for masks that are bands: one owns queries, one keys."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.attention_backward import query_tiles_of
from attn_kernels_triton.kernels.common import LOG2_E, owned_keys, owned_queries, read, spans, start_of, write


@triton.jit
def pad(call):
    """Write `delta` and `padded` from lse, the output `second` and its gradient. Grid as in the forward kernel."""
    batch, head, block, _ = owned_queries(call)
    queries = call.shape.queries
    rows = block * call.tile.queries + tl.arange(0, call.tile.queries)
    start = start_of(call.second, batch, head)
    out = read(call.second, start, rows, queries, call.tile.value_size, call.tile.value_width).to(tl.float32)
    start = start_of(call.out, batch, head)
    change = read(call.out, start, rows, queries, call.tile.value_size, call.tile.value_width).to(tl.float32)
    number = tl.cast(batch * call.shape.heads + head, tl.int64)
    lse = tl.load(call.lse + number * queries + rows, mask=rows < queries, other=float("inf"))
    # A query that sees nothing has lse -inf; +inf instead makes all its weights zero.
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(call.padded.lse + number * call.padded.rows + rows, lse)
    delta = tl.sum(out * change, 1)
    tl.store(call.padded.delta + number * call.padded.rows + rows, delta)
    tl.store(call.delta + number * queries + rows, delta, mask=rows < queries)


@triton.jit
def gradient_to_dense_keys(call, queries, changes, lse, delta, keys, values):
    """Grid and results as in `gradient_to_keys`; the other arguments are descriptors of tiles of [batch, head, row,
    size] and, for lse and delta, of [batch * head, row]."""
    shape = call.shape
    batch, owner, block, text = owned_keys(call)
    first = block * call.tile.keys
    key = tile_at(keys, (batch, owner, first), call.tile.keys, call.tile.key_width)
    value = tile_at(values, (batch, owner, first), call.tile.keys, call.tile.value_width)
    to_key = tl.zeros([call.tile.keys, call.tile.key_width], tl.float32)
    to_value = tl.zeros([call.tile.keys, call.tile.value_width], tl.float32)
    start, in_a_row = query_tiles_of(call, owner, block, text)
    # Computed outside of the loop: integers that are 1 are constants, which Triton 3.6 loses inside loops.
    first_head = owner * shape.group
    first_line = batch * shape.heads + first_head
    # All heads that share these keys are processed in one loop, so that the software pipeline is not interrupted.
    for step in range(in_a_row * shape.group):
        group_head = step // in_a_row
        place = batch, first_head + group_head, (start + step - group_head * in_a_row) * call.tile.queries
        query = tile_at(queries, place, call.tile.queries, call.tile.key_width)
        change = tile_at(changes, place, call.tile.queries, call.tile.value_width)
        weights = weights_of(call, (key, query), place, (first, line_at(lse, call, first_line + group_head, place[2])))
        to_value = tl.dot(weights.to(change.dtype), change, to_value)
        # The accumulator starts at -delta, so that delta takes no registers of its own.
        below = (
            tl.zeros([call.tile.keys, call.tile.queries], tl.float32)
            - line_at(delta, call, first_line + group_head, place[2])[None, :]
        )
        dp = tl.dot(value, tl.trans(change), below)
        to_key = tl.dot((weights * dp).to(query.dtype), query, to_key)
    rows = first + tl.arange(0, call.tile.keys)
    to_key *= call.rule.scale
    write(call.first, start_of(call.first, batch, owner), rows, shape.keys, to_key, call.tile.key_size)
    write(call.second, start_of(call.second, batch, owner), rows, shape.keys, to_value, call.tile.value_size)


@triton.jit
def tile_at(tiles, place, rows: tl.constexpr, width: tl.constexpr):
    """Load a tile [rows, width] of a batch and head, from a row on."""
    return tl.reshape(tiles.load([place[0], place[1], place[2], 0]), (rows, width))


@triton.jit
def line_at(sums, call, number, row):
    """Load the elements of `sums` [batch * head, row] for a tile of queries, from a row on."""
    return tl.reshape(sums.load([number, row]), (call.tile.queries,))


@triton.jit
def weights_of(call, tiles, place, here):
    """The attention weights [key, query] of a tile of keys, from row `here[0]` on, and a tile of queries with lse
    `here[1]`. Keys behind the last one are not masked: their sums are not written."""
    shape = call.shape
    products = tl.dot(tiles[0], tl.trans(tiles[1]))
    # Recomputed for each tile: as loop invariants they would take registers.
    column = (place[2] + tl.arange(0, call.tile.queries))[None, :]
    at = here[0] + tl.arange(0, call.tile.keys) - (shape.keys - shape.queries)
    if call.rule.right is not None:
        products = tl.where(column >= (at - call.rule.right)[:, None], products, float("-inf"))
    if call.rule.left is not None:
        products = tl.where(column <= (at + call.rule.left)[:, None], products, float("-inf"))
    return tl.exp2(products * (call.rule.scale * LOG2_E) - here[1][None, :])


@triton.jit
def gradient_to_dense_queries(call, queries, changes, lse, delta, keys, values):
    """Grid and results as in `gradient_to_queries`; the other arguments as in `gradient_to_dense_keys`."""
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
        summed = add_query_gradient(call, here, (key, value, there[2]), summed, masked=False)
    # Both ends share one loop: a second one would need too many registers.
    for index in range(whole_start - start + stop - whole_stop):
        step = start + index
        step = tl.where(step < whole_start, step, step - whole_start + whole_stop)
        there = batch, owner, step * call.tile.keys
        key = tile_at(keys, there, call.tile.keys, call.tile.key_width)
        value = tile_at(values, there, call.tile.keys, call.tile.value_width)
        summed = add_query_gradient(call, here, (key, value, there[2]), summed, masked=True)
    start_query = start_of(call.first, batch, head)
    write(call.first, start_query, rows, shape.queries, summed * call.rule.scale, call.tile.key_size)


@triton.jit
def add_query_gradient(call, here, there, summed, masked: tl.constexpr):
    """Add the gradient of queries from one tile of keys; pairs are checked against the mask if `masked`."""
    query, change, lse, delta, at = here
    key, value, first = there
    products = tl.dot(query, tl.trans(key))
    dp = tl.dot(change, tl.trans(value))
    if masked:
        column = tl.arange(0, call.tile.keys)[None, :]
        last = tl.zeros_like(at) + call.shape.keys - 1
        if call.rule.right is not None:
            last = tl.minimum(at + call.rule.right, last)
        products = tl.where(column <= (last - first)[:, None], products, float("-inf"))
        if call.rule.left is not None:
            products = tl.where(column >= (at - call.rule.left - first)[:, None], products, float("-inf"))
    weights = tl.exp2(products * (call.rule.scale * LOG2_E) - lse[:, None])
    ds = weights * (dp - delta[:, None])
    return tl.dot(ds.to(key.dtype), key, summed)
