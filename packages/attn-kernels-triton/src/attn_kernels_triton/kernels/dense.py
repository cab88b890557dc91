"""Forward programs whose tiles are fetched by the chip's own copier (TMA), for masks that are bands.

As of `forward`, with nothing asked of whole tiles, and logits that are products times a positive scale: so much is the
greatest product that of the greatest logit, and each product meets one fused instruction before the exponential.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.forward import begun, finish
from attn_kernels_triton.kernels.rows import start_of
from attn_kernels_triton.kernels.scores import LOG2_E
from attn_kernels_triton.kernels.spans import spans
from attn_kernels_triton.kernels.texts import owned_queries


@triton.jit
def attend_dense(call, queries, keys, values):
    """Grid as of `attend_forward`; the others are descriptors of tiles of [batch, head, row, size]."""
    shape = call.shape
    batch, head, block, text = owned_queries(call)
    query = tl.reshape(
        queries.load([batch, head, block * call.tile.queries, 0]), (call.tile.queries, call.tile.key_width)
    )
    first = block * call.tile.queries + shape.keys - shape.queries
    span = spans(
        call, first, first + call.tile.queries - 1, (call.rule.left, call.rule.right), shape.keys, call.tile.keys
    )
    start, whole_start, whole_stop, stop = span
    running = begun(call, head)
    owner = head // shape.group
    for step in range(whole_start, whole_stop):
        key, value = fetched(call, keys, values, (batch, owner, step * call.tile.keys))
        running = meet(call, (query, block), (key, value, step), running, ask=False)
    # Both ends in one loop: another one would need more registers than there are.
    for index in range(whole_start - start + stop - whole_stop):
        step = start + index
        step = tl.where(step < whole_start, step, step - whole_start + whole_stop)
        key, value = fetched(call, keys, values, (batch, owner, step * call.tile.keys))
        running = meet(call, (query, block), (key, value, step), running, ask=True)
    finish(call, (batch, head, block, text), running)


@triton.jit
def fetched(call, keys, values, place):
    """A tile of keys and one of values."""
    batch, owner, row = place
    key = tl.reshape(keys.load([batch, owner, row, 0]), (call.tile.keys, call.tile.key_width))
    value = tl.reshape(values.load([batch, owner, row, 0]), (call.tile.keys, call.tile.value_width))
    return key, value


@triton.jit
def attend_specialised(call):
    """As `attend_dense`, with warps that only fetch and warps that only compute (Shah et al. 2024, arXiv 2407.08608,
    section 3.1). Triton 3.6 to 3.9 part warps only where there is one loop, without branches, over descriptors that the
    program itself has made."""
    shape = call.shape
    batch, head, block, text = owned_queries(call)
    owner = head // shape.group
    queries = tl.make_tensor_descriptor(
        start_of(call.query, batch, head),
        [shape.queries, call.tile.key_size],
        [call.query.row, 1],
        [call.tile.queries, call.tile.key_width],
    )
    keys = tl.make_tensor_descriptor(
        start_of(call.key, batch, owner),
        [shape.keys, call.tile.key_size],
        [call.key.row, 1],
        [call.tile.keys, call.tile.key_width],
    )
    values = tl.make_tensor_descriptor(
        start_of(call.value, batch, owner),
        [shape.keys, call.tile.value_size],
        [call.value.row, 1],
        [call.tile.keys, call.tile.value_width],
    )
    query = queries.load([block * call.tile.queries, 0])
    first = block * call.tile.queries + shape.keys - shape.queries
    span = spans(
        call, first, first + call.tile.queries - 1, (call.rule.left, call.rule.right), shape.keys, call.tile.keys
    )
    running = begun(call, head)
    for step in tl.range(span[0], span[3], warp_specialize=True):
        key, value = keys.load([step * call.tile.keys, 0]), values.load([step * call.tile.keys, 0])
        running = meet(call, (query, block), (key, value, step), running, ask=True)
    finish(call, (batch, head, block, text), running)


@triton.jit
def meet(call, here, there, running, ask: tl.constexpr):
    """Meet one tile of keys; its pairs are asked about if `ask`."""
    query, block = here
    key, value, step = there
    summed, total, top = running
    products = tl.dot(query, tl.trans(key))
    if ask:
        products = within(call, products, block, step)
    scale = call.rule.scale * LOG2_E
    highest = tl.maximum(top, tl.max(products, 1) * scale)
    base = highest
    if ask:
        # Where nothing has been seen yet, a number in place of -inf, from which nothing can be subtracted.
        base = tl.where(highest == float("-inf"), 0.0, highest)
    shares = tl.exp2(products * scale - base[:, None])
    faded = tl.exp2(top - base)
    summed = tl.dot(shares.to(value.dtype), value, summed * faded[:, None])
    return summed, total * faded + tl.sum(shares, 1), highest


@triton.jit
def within(call, products, block, step):
    """Products with -inf where a query does not see a key, from two numbers a row: a pair is compared once or twice."""
    shape = call.shape
    column = tl.arange(0, call.tile.keys)[None, :]
    at = block * call.tile.queries + tl.arange(0, call.tile.queries) + shape.keys - shape.queries
    last = tl.zeros_like(at) + shape.keys - 1
    if call.rule.right is not None:
        last = tl.minimum(at + call.rule.right, last)
    products = tl.where(column <= (last - step * call.tile.keys)[:, None], products, float("-inf"))
    if call.rule.left is not None:
        first = at - call.rule.left - step * call.tile.keys
        products = tl.where(column >= first[:, None], products, float("-inf"))
    return products
