"""From products of queries and keys to logits, and which pairs may meet.

Positions come as [query, 1] and [1, key], or turned, so that the same lines serve tiles of either orientation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.texts import keys_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """tanh, from the exponential function alone."""
    power = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    positive = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -positive, positive)


@triton.jit
def logits(call, products, head, query, key):
    """Logits to the base 2 of products, and by how much a change of a product changes them, to the base e.

    The second is the scale alone, or a tile where scores are capped.
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
    """Positions [rows], int32: those given, or counted from `offset`."""
    if given is None:
        places = rows + offset
    else:
        places = tl.load(given + tl.cast(batch, tl.int64) * stride + rows, mask=rows < count, other=0)
    return places


@triton.jit
def hidden(call, powers, who, pairs, places):
    """Logits with -inf where a pair may not meet; that the key exists is for the caller to see to.

    `who` is batch, head, the slot of the block's bits, and the text, see `texts`; `pairs` rows and keys by number,
    `places` by position.
    """
    batch, head, slot, text = who
    rows, keys = pairs
    query, key = places
    never = float("-inf")
    if call.rule.left is not None:
        powers = tl.where(query - key <= call.rule.left, powers, never)
    if call.rule.right is not None:
        powers = tl.where(key - query <= call.rule.right, powers, never)
    if call.places.keep is not None:
        start = call.places.keep + tl.cast(batch, tl.int64) * call.places.keep_batch
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
