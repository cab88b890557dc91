"""The backward kernel for learned relative biases: a program owns a diagonal of tiles, so it needs no atomic additions.

Pairs at the same place in all tiles of a diagonal have the same distance. The kernel sums gradients of scores place by
place; the host sums places by distance. Sums always have the same order, so gradients are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.common import (
    apply_mask,
    dropout_mask_at,
    first_key,
    first_query,
    first_sum,
    keys_of,
    logits,
    queries_of,
    read,
    start_of,
    text_at,
)


@triton.jit
def gradient_to_biases(call):
    """Write the sums of `diagonals`. Grid: diagonals, for each head of each slice."""
    given = call.diagonals
    place = tl.program_id(0) % given.count
    head = tl.program_id(0) // given.count % call.shape.heads
    part = tl.program_id(0) // given.count // call.shape.heads
    diagonal = given.first + place
    summed = tl.zeros([call.tile.queries, call.tile.queries], tl.float32)
    heads = (head, head // call.shape.group)
    for number in range(part, given.number, given.slices):
        summed = along(call, number, heads, diagonal, summed)
    slot = tl.cast(part * call.shape.heads + head, tl.int64)
    if (diagonal >= given.near) & (diagonal < given.near_stop):
        start = given.sums + (slot * (given.near_stop - given.near) + diagonal - given.near) * (
            call.tile.queries * call.tile.queries
        )
        across = tl.arange(0, call.tile.queries)
        tl.store(start + across[:, None] * call.tile.queries + across[None, :], summed)
    else:
        tl.store(given.far + slot * given.count + place, tl.sum(tl.sum(summed, 1), 0))


@triton.jit
def along(call, number, heads, diagonal, summed):
    """Add the gradients of scores of all tiles of a diagonal of one text, place by place.

    `heads` are the query head and the key/value head.
    """
    if call.texts is None:
        batch = number
        text = (number, number, number, number, number)
    else:
        entry = call.texts + number * 7
        batch = tl.load(entry)
        text = text_at(entry)
    queries, keys = queries_of(call, text), keys_of(call, text)
    # The first key of the tile of the first queries; tiles before key 0 have no keys.
    first = keys - queries + diagonal * call.tile.queries
    start = tl.maximum(-first, 0) // call.tile.queries
    stop = tl.minimum(tl.cdiv(tl.maximum(keys - first, 0), call.tile.queries), tl.cdiv(queries, call.tile.queries))
    for index in range(stop - start):
        step = start + index
        summed += ds_of(call, (batch, heads, text), step * call.tile.queries, first + step * call.tile.queries)
    return summed


@triton.jit
def ds_of(call, who, row, key):
    """The gradients of the scores of a tile that begins at query `row` and key `key`."""
    batch, heads, text = who
    head, owner = heads
    queries, count = queries_of(call, text), keys_of(call, text)
    rows, keys = row + tl.arange(0, call.tile.queries), key + tl.arange(0, call.tile.keys)
    real = (keys >= 0) & (keys < count)
    # Keys before the first one read the first one instead, and are masked.
    keys = tl.maximum(keys, 0)
    query, change = queries_read(call, (batch, head, text), rows)
    found, value = keys_read(call, (batch, owner, text), keys)
    lse = tl.load(first_sum(call, call.lse, batch, head, text) + rows, mask=rows < queries, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(first_sum(call, call.delta, batch, head, text) + rows, mask=rows < queries, other=0.0)
    at = rows + count - queries
    products = tl.dot(query, tl.trans(found), input_precision="ieee")
    powers, _ = logits(call, products, head, at[:, None], keys[None, :])
    pairs = (rows[:, None], keys[None, :])
    slot = 0
    if call.blocks.size is not None:
        slot = slot_of(call, head, pairs, count)
        powers = tl.where(slot >= 0, powers, float("-inf"))
        slot = tl.maximum(slot, 0)
    powers = apply_mask(call, powers, (batch, head, slot, text), pairs, (at[:, None], keys[None, :]))
    powers = tl.where(real[None, :], powers, float("-inf"))
    weights = tl.exp2(powers - lse[:, None])
    dp = tl.dot(change, tl.trans(value), input_precision="ieee")
    if call.dropout.state is not None:
        dp = tl.where(dropout_mask_at(call, (batch, head, text), rows, keys), dp * call.dropout.scale, 0.0)
    return weights * (dp - delta[:, None])


@triton.jit
def queries_read(call, who, rows):
    """Load the queries of these rows and the gradients of their outputs."""
    batch, head, text = who
    queries = queries_of(call, text)
    query = read(
        call.query,
        first_query(call, call.query, start_of(call.query, batch, head), text),
        rows,
        queries,
        call.tile.key_size,
        call.tile.key_width,
    )
    change = read(
        call.out,
        first_query(call, call.out, start_of(call.out, batch, head), text),
        rows,
        queries,
        call.tile.value_size,
        call.tile.value_width,
    )
    return query, change


@triton.jit
def keys_read(call, who, keys):
    """Load these keys and their values."""
    batch, owner, text = who
    count = keys_of(call, text)
    found = read(
        call.key,
        first_key(call, call.key, start_of(call.key, batch, owner), text),
        keys,
        count,
        call.tile.key_size,
        call.tile.key_width,
    )
    value = read(
        call.value,
        first_key(call, call.value, start_of(call.value, batch, owner), text),
        keys,
        count,
        call.tile.value_size,
        call.tile.value_width,
    )
    return found, value


@triton.jit
def slot_of(call, head, pairs, count):
    """The slot of the block of each pair, -1 if the block is empty."""
    rows, keys = pairs
    size = call.blocks.size
    row = rows // size
    if call.blocks.heads is not None:
        row += head * call.blocks.heads
    inside = (rows < call.shape.queries) & (keys < count)
    return tl.load(call.blocks.map + row * tl.cdiv(call.shape.keys, size) + keys // size, mask=inside, other=-1)
