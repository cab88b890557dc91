"""Attention over e4m3 codes: what makes them, and what meets them (Shah et al. 2024, arXiv 2407.08608, section 3.3)."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.dense import within
from attn_kernels_triton.kernels.forward import begun, finish
from attn_kernels_triton.kernels.rows import read, start_of
from attn_kernels_triton.kernels.scores import LOG2_E
from attn_kernels_triton.kernels.spans import spans
from attn_kernels_triton.kernels.texts import owned_queries

BLOCK = tl.constexpr(128)
"""Rows that share a scale."""
LARGEST = tl.constexpr(448.0)
"""The largest number that e4m3 holds."""
LIFT, LIFTED = tl.constexpr(8.0), tl.constexpr(256.0)
"""By what weights, at most 1, are made larger before they are rounded, so that few are below all codes: its logarithm
to the base 2, and itself."""


@triton.jit
def make_codes(call):
    """Grid: blocks of rows, for each head of each batch; writes codes and the scale of the block."""
    blocks = tl.cdiv(call.count, BLOCK)
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks % call.heads
    batch = tl.program_id(0) // blocks // call.heads
    rows = block * BLOCK + tl.arange(0, BLOCK)
    found = read(call.rows, start_of(call.rows, batch, head), rows, call.count, call.size, call.width)
    across = tl.arange(0, call.width)
    if call.rotation is not None:
        rotation = tl.load(call.rotation + across[:, None] * call.width + across[None, :])
        turned = tl.dot(found, rotation, input_precision="ieee")
    else:
        turned = found.to(tl.float32)
    highest = tl.max(tl.abs(turned))
    scale = tl.where(highest == 0.0, 1.0, highest / LARGEST)
    codes = (turned / scale).to(tl.float8e4nv)
    first = tl.cast(batch * call.heads + head, tl.int64) * call.width * blocks * BLOCK
    if call.turned:
        # The matrix unit wants codes that it sums over side by side.
        tl.store(call.codes + first + across[None, :] * (blocks * BLOCK) + rows[:, None], codes)
    else:
        tl.store(call.codes + first + rows[:, None] * call.width + across[None, :], codes)
    tl.store(call.scales + (batch * call.heads + head) * blocks + block, scale)


@triton.jit
def attend_codes(call, queries, keys, values):
    """Grid as of `attend_forward`; the others are descriptors of tiles of codes [head of batch and row, size], of
    values [head of batch and size, row]."""
    shape = call.shape
    batch, head, block, text = owned_queries(call)
    owner = batch * (shape.heads // shape.group) + head // shape.group
    blocks = tl.cdiv(shape.queries, BLOCK)
    one = batch * shape.heads + head
    query = queries.load([one * blocks * BLOCK + block * call.tile.queries, 0])
    scale = tl.load(call.query_scales + one * blocks + block * call.tile.queries // BLOCK)
    scale *= call.rule.scale * LOG2_E
    first = block * call.tile.queries + shape.keys - shape.queries
    reach = (call.rule.left, call.rule.right)
    start, whole_start, whole_stop, stop = spans(
        call, first, first + call.tile.queries - 1, reach, shape.keys, call.tile.keys
    )
    summed, total, top = begun(call, head)
    total *= LIFTED
    for step in range(whole_start, whole_stop):
        key, value, scales = fetched(call, keys, values, owner, step)
        summed, total, top = meet(
            call, (query, scale, block), (key, value, scales, step), (summed, total, top), ask=False
        )
    for index in range(whole_start - start + stop - whole_stop):
        step = start + index
        step = tl.where(step < whole_start, step, step - whole_start + whole_stop)
        key, value, scales = fetched(call, keys, values, owner, step)
        summed, total, top = meet(
            call, (query, scale, block), (key, value, scales, step), (summed, total, top), ask=True
        )
    finish(call, (batch, head, block, text), (summed / LIFTED, total / LIFTED, top))


@triton.jit
def fetched(call, keys, values, owner, step):
    """The codes of a tile of keys and of one of values, and their scales."""
    blocks = tl.cdiv(call.shape.keys, BLOCK)
    key = keys.load([owner * blocks * BLOCK + step * call.tile.keys, 0])
    value = values.load([owner * call.tile.value_width, step * call.tile.keys])
    at = owner * blocks + step * call.tile.keys // BLOCK
    return key, value, (tl.load(call.key_scales + at), tl.load(call.value_scales + at))


@triton.jit
def meet(call, here, there, running, ask: tl.constexpr):
    """Meet one tile of keys; its pairs are asked about if `ask`."""
    query, scale, block = here
    key, value, scales, step = there
    summed, total, top = running
    key_scale, value_scale = scales
    products = tl.dot(query, tl.trans(key))
    if ask:
        products = within(call, products, block, step)
    scale *= key_scale
    highest = tl.maximum(top, tl.max(products, 1) * scale)
    # Where nothing has been seen yet, a number in place of -inf, from which nothing can be subtracted.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shares = tl.exp2(products * scale - (base - LIFT)[:, None])
    faded = tl.exp2(top - base)
    # Each tile's sums are added in float32: the matrix unit itself adds codes up with fewer digits.
    part = tl.dot(shares.to(value.dtype), tl.trans(value))
    return summed * faded[:, None] + part * value_scale, total * faded + tl.sum(shares, 1), highest
