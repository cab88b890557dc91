"""Which tile of which text a program owns: rows of a batch, or texts packed into one.

`text` is where the queries of a text begin, how many there are, the same of its keys, and its number; where nothing is
packed these mean nothing, and are never asked.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def owned_queries(call):
    """Batch, head, number of the tile of queries, and text; tiles that see most keys of a causal call come first."""
    shape = call.shape
    if call.texts is None:
        tiles = tl.cdiv(shape.queries, call.tile.queries)
        block = tiles - 1 - tl.program_id(0) % tiles
        batch = tl.program_id(0) // tiles // shape.heads
        head = tl.program_id(0) // tiles % shape.heads
        text = (block, block, block, block, block)
    else:
        head, batch, block, text = of_list(call, shape.heads)
    return batch, head, block, text


@triton.jit
def owned_keys(call):
    """Batch, key/value head, number of the tile of keys, and text."""
    shape = call.shape
    shared = shape.heads // shape.group
    if call.texts is None:
        tiles = tl.cdiv(shape.keys, call.tile.keys)
        block = tl.program_id(0) % tiles
        batch = tl.program_id(0) // tiles // shared
        owner = tl.program_id(0) // tiles % shared
        text = (block, block, block, block, block)
    else:
        owner, batch, block, text = of_list(call, shared)
    return batch, owner, block, text


@triton.jit
def of_list(call, heads):
    """Head, batch, number of the tile, and text, of a list of tiles that is the same for all heads."""
    tiles = tl.num_programs(0) // heads
    entry = call.texts + tl.program_id(0) % tiles * 7
    return tl.program_id(0) // tiles, tl.load(entry), tl.load(entry + 1), text_at(entry)


@triton.jit
def text_at(entry):
    """The text of an entry of a list of tiles."""
    first_query, queries, first_key = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    return first_query, queries, first_key, tl.load(entry + 5), tl.load(entry + 6)


@triton.jit
def queries_of(call, text):
    """How many queries the text has."""
    return call.shape.queries if call.texts is None else text[1]


@triton.jit
def keys_of(call, text):
    """How many keys the text has."""
    return call.shape.keys if call.texts is None else text[3]


@triton.jit
def first_query(call, view, start, text):
    """The address of the first query of the text, whose row starts at `start`."""
    if call.texts is not None:
        start += tl.cast(text[0], tl.int64) * view.row
    return start


@triton.jit
def first_key(call, view, start, text):
    """The address of the first key of the text, whose row starts at `start`."""
    if call.texts is not None:
        start += tl.cast(text[2], tl.int64) * view.row
    return start


@triton.jit
def first_sum(call, sums, batch, head, text):
    """The address of what is kept of the first query of the text: `sums` [batch, heads, queries]."""
    start = sums + tl.cast(batch * call.shape.heads + head, tl.int64) * call.shape.queries
    if call.texts is not None:
        start += text[0]
    return start
