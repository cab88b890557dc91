"""Helpers that all attention kernels share: reading tiles, varlen documents, tile ranges, masks, dropout."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def start_of(view, batch, head):
    """The address of the first row of a head, with 64-bit offsets: only offsets within a head fit 32 bits."""
    return view.data + tl.cast(batch, tl.int64) * view.batch + tl.cast(head, tl.int64) * view.head


@triton.jit
def read(view, start, rows, count, size: tl.constexpr, width: tl.constexpr):
    """Load rows [rows, width], with zeros behind the last of `count` rows and behind `size`."""
    across = tl.arange(0, width)
    at = start + rows[:, None] * view.row + across[None, :]
    if size == width:
        found = tl.load(at, mask=rows[:, None] < count, other=0.0)
    else:
        found = tl.load(at, mask=(rows[:, None] < count) & (across[None, :] < size), other=0.0)
    return found


@triton.jit
def read_whole(view, start, rows, size: tl.constexpr, width: tl.constexpr):
    """Load rows [rows, width] that all exist, with zeros behind `size`."""
    across = tl.arange(0, width)
    at = start + rows[:, None] * view.row + across[None, :]
    return tl.load(at) if size == width else tl.load(at, mask=across[None, :] < size, other=0.0)


@triton.jit
def write(view, start, rows, count, content, size: tl.constexpr):
    """Store the rows [rows, width] that exist, in the dtype of the tensor."""
    across = tl.arange(0, content.shape[1])
    at = start + rows[:, None] * view.row + across[None, :]
    inside = (rows[:, None] < count) & (across[None, :] < size)
    tl.store(at, content.to(view.data.dtype.element_ty), mask=inside)


@triton.jit
def owned_queries(call):
    """Batch, head, query tile and text of this program; tiles that see most keys under a causal mask come first."""
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
    """Batch, key/value head, key tile and text of this program."""
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
    """Head, batch, tile and text of this program, from a list of tiles that is the same for all heads."""
    tiles = tl.num_programs(0) // heads
    entry = call.texts + tl.program_id(0) % tiles * 7
    return tl.program_id(0) // tiles, tl.load(entry), tl.load(entry + 1), text_at(entry)


@triton.jit
def text_at(entry):
    """The text of an entry of a tile list: first query, queries, first key, keys, number."""
    first_query, queries, first_key = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    return first_query, queries, first_key, tl.load(entry + 5), tl.load(entry + 6)


@triton.jit
def queries_of(call, text):
    """The number of queries of the text."""
    return call.shape.queries if call.texts is None else text[1]


@triton.jit
def keys_of(call, text):
    """The number of keys of the text."""
    return call.shape.keys if call.texts is None else text[3]


@triton.jit
def first_query(call, view, start, text):
    """The address of the first query of the text, whose batch row begins at `start`."""
    if call.texts is not None:
        start += tl.cast(text[0], tl.int64) * view.row
    return start


@triton.jit
def first_key(call, view, start, text):
    """The address of the first key of the text, whose batch row begins at `start`."""
    if call.texts is not None:
        start += tl.cast(text[2], tl.int64) * view.row
    return start


@triton.jit
def first_sum(call, sums, batch, head, text):
    """The address of the element of `sums` [batch, heads, queries] for the first query of the text."""
    start = sums + tl.cast(batch * call.shape.heads + head, tl.int64) * call.shape.queries
    if call.texts is not None:
        start += text[0]
    return start


@triton.jit
def spans(call, first, last, reach, count, size: tl.constexpr):
    """The range of tiles that positions `first` to `last` attend to, of `count` positions in tiles of `size`.

    Returns the first tile, the first and the end of those without masked pairs, and the end of all. `reach` is how far
    before and after a position others are visible; None is no bound.
    """
    before, after = reach
    start = 0
    whole_start = 0
    if before is not None:
        start = tl.maximum(first - before, 0)
        whole_start = tl.maximum(last - before, 0)
    stop = count
    whole_stop = count
    if after is not None:
        stop = tl.maximum(tl.minimum(last + after + 1, count), 0)
        whole_stop = tl.maximum(tl.minimum(first + after + 1, count), 0)
    start = tl.minimum(start // size, tl.cdiv(count, size))
    stop = tl.maximum(tl.cdiv(stop, size), start)
    if call.places.key_padding_mask is None and call.places.pairs is None and call.places.key is None:
        whole_start = tl.minimum(tl.maximum(tl.cdiv(whole_start, size), start), stop)
        whole_stop = tl.maximum(tl.minimum(whole_stop // size, stop), whole_start)
    else:
        # Every pair must be checked.
        whole_start = start
        whole_stop = start
    return start, whole_start, whole_stop, stop


@triton.jit
def listed(starts, blocks, row, size: tl.constexpr):
    """The first step and the end of the steps through the list of a block row; a block holds several tiles."""
    several: tl.constexpr = blocks.size // size
    return tl.load(starts + row) * several, tl.load(starts + row + 1) * several


@triton.jit
def listed_tile(blocks, columns, step, size: tl.constexpr):
    """The tile at a step through the list of a block row."""
    several: tl.constexpr = blocks.size // size
    entry = step // several
    # Without %, which the interpreter does not support for loop variables.
    return tl.load(columns + entry) * several + (step - entry * several)


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """tanh(x), computed by the exponential function."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    positive = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -positive, positive)


@triton.jit
def logits(call, products, head, query, key):
    """The base-2 logits of query-key products, and the derivative of the natural logits by the products.

    The derivative is the scale alone, or a tile if scores are capped.
    """
    rule = call.rule
    slope = rule.scale
    if rule.cap is None and rule.slopes is None and rule.bias is None:
        powers = products * (rule.scale * LOG2_E)
    else:
        scores = products * rule.scale
        if rule.cap is not None:
            share = tanh(scores / rule.cap)
            scores = share * rule.cap
            slope = (1.0 - share * share) * rule.scale
        if rule.slopes is not None:
            scores -= tl.load(rule.slopes + head) * tl.abs(query - key).to(tl.float32)
        if rule.bias is not None:
            away = tl.minimum(tl.maximum(key - query, -rule.far), rule.far) + rule.far
            scores += tl.load(rule.bias + head * (2 * rule.far + 1) + away)
        powers = scores * LOG2_E
    return powers, slope


@triton.jit
def places_of(given, stride, batch, rows, count, offset):
    """The positions [rows], int32: those given, or row numbers plus `offset`."""
    if given is None:
        places = rows + offset
    else:
        places = tl.load(given + tl.cast(batch, tl.int64) * stride + rows, mask=rows < count, other=0)
    return places


@triton.jit
def apply_mask(call, powers, who, pairs, places):
    """The logits with -inf where a pair is masked; the caller masks keys that do not exist.

    `who` is batch, head, slot of the block's bits, and text, see `text_at`; `pairs` are the numbers of queries and
    keys, `places` their positions.
    """
    batch, head, slot, text = who
    rows, keys = pairs
    query, key = places
    never = float("-inf")
    if call.rule.left is not None:
        powers = tl.where(query - key <= call.rule.left, powers, never)
    if call.rule.right is not None:
        powers = tl.where(key - query <= call.rule.right, powers, never)
    if call.places.key_padding_mask is not None:
        start = call.places.key_padding_mask + tl.cast(batch, tl.int64) * call.places.keep_batch
        if call.texts is not None:
            start += text[2]
        powers = tl.where(tl.load(start + keys, mask=keys < keys_of(call, text), other=0) != 0, powers, never)
    if call.places.pairs is not None:
        start = call.places.pairs + tl.cast(batch, tl.int64) * call.places.pairs_batch
        start += tl.cast(head, tl.int64) * call.places.pairs_head
        inside = (rows < call.shape.queries) & (keys < call.shape.keys)
        pair = tl.load(start + tl.cast(rows, tl.int64) * call.shape.keys + keys, mask=inside, other=0)
        powers = tl.where(pair != 0, powers, never)
    if call.blocks.size is not None:
        words = call.blocks.size // 32
        row, column = rows % call.blocks.size, keys % call.blocks.size
        start = call.blocks.bits + tl.cast(slot, tl.int64) * (call.blocks.size * words)
        word = tl.load(start + row * words + column // 32)
        powers = tl.where(((word >> (column % 32)) & 1) != 0, powers, never)
    return powers


@triton.jit
def philox_counters(call, who):
    """The dropout seed, the two Philox counters that a whole tile shares, and the threshold of the random words."""
    batch, head, text = who
    state = call.dropout.state
    row = tl.load(state + 2) + batch
    if call.texts is not None:
        row = tl.load(state + 2) + text[4]
    row = row * call.shape.heads + head
    return tl.load(state), row.to(tl.uint32), tl.load(state + 1).to(tl.uint32), tl.load(state + 3).to(tl.uint32)


@triton.jit
def dropout_mask(call, who, rows, first):
    """The dropout mask of a tile [query, key] whose keys begin at `first`, a multiple of 4."""
    seed, row, offset, threshold = philox_counters(call, who)
    queries: tl.constexpr = call.tile.queries
    keys: tl.constexpr = call.tile.keys
    key = tl.zeros([queries, keys // 4], tl.uint32) + (first // 4 + tl.arange(0, keys // 4))[None, :].to(tl.uint32)
    query = tl.zeros([queries, keys // 4], tl.uint32) + rows[:, None].to(tl.uint32)
    zero, one, two, three = tl.philox(seed, key, query, row + key * 0, offset + key * 0)
    words = tl.reshape(tl.join(tl.join(zero, two), tl.join(one, three)), [queries, keys])
    return words >= threshold


@triton.jit
def dropout_mask_at(call, who, rows, keys):
    """The dropout mask of a tile [query, key] with arbitrary keys."""
    seed, row, offset, threshold = philox_counters(call, who)
    key = tl.zeros([call.tile.queries, call.tile.keys], tl.uint32) + (keys // 4)[None, :].to(tl.uint32)
    query = key * 0 + rows[:, None].to(tl.uint32)
    zero, one, two, three = tl.philox(seed, key, query, row + key * 0, offset + key * 0)
    place = (keys % 4)[None, :]
    words = tl.where(place == 0, zero, tl.where(place == 1, one, tl.where(place == 2, two, three)))
    return words >= threshold
