"""Attention over e4m3 codes: the kernel that quantizes and the one that attends (arXiv 2407.08608, section 3.3)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import NOTHING_DROPPED, Dropped, Places, Rows, Rule, Shape, Tile
from attn_kernels_triton.kernels.attention_forward import apply_band, finish, initial_sums
from attn_kernels_triton.kernels.common import LOG2_E, owned_queries, read, spans, start_of


class MakeCodes(NamedTuple):
    """The argument of the kernel that quantizes `rows`, `count` per head, of `heads` heads.

    `rotation` [width, width], of the dtype of the rows, is multiplied with them first; None for no rotation. `codes`
    [batch, head, row, width], or [batch, head, width, row] if `transposed`, are padded to whole blocks; `scales` are
    [batch, head, block], float32.
    """

    rows: Rows
    count: Any
    heads: Any
    rotation: Any
    codes: Any
    scales: Any
    size: Any
    width: Any
    transposed: Any


class AttendCodes(NamedTuple):
    """The argument of the attention kernel over codes; `lse` as in `Forward`, scales as in `MakeCodes`."""

    query_scales: Any
    key_scales: Any
    value_scales: Any
    out: Rows
    lse: Any
    shape: Shape
    rule: Rule
    places: Places
    tile: Tile
    texts: Any = None
    dropout: Dropped = NOTHING_DROPPED


BLOCK = tl.constexpr(128)
"""The number of rows that share a scale."""
LARGEST = tl.constexpr(448.0)
"""The largest number of e4m3."""
LIFT, LIFTED = tl.constexpr(8.0), tl.constexpr(256.0)
"""The factor (its base-2 logarithm, and itself) by which weights, at most 1, are multiplied before they are rounded to
e4m3, so that few of them underflow."""


@triton.jit
def make_codes(call):
    """Write the codes and the scale of a block of rows. Grid: blocks of rows, for each head of each batch."""
    blocks = tl.cdiv(call.count, BLOCK)
    block, head = tl.program_id(0) % blocks, tl.program_id(0) // blocks % call.heads
    batch = tl.program_id(0) // blocks // call.heads
    rows = block * BLOCK + tl.arange(0, BLOCK)
    found = read(call.rows, start_of(call.rows, batch, head), rows, call.count, call.size, call.width)
    across = tl.arange(0, call.width)
    if call.rotation is not None:
        rotation = tl.load(call.rotation + across[:, None] * call.width + across[None, :])
        rotated = tl.dot(found, rotation, input_precision="ieee")
    else:
        rotated = found.to(tl.float32)
    highest = tl.max(tl.abs(rotated))
    scale = tl.where(highest == 0.0, 1.0, highest / LARGEST)
    codes = (rotated / scale).to(tl.float8e4nv)
    first = tl.cast(batch * call.heads + head, tl.int64) * call.width * blocks * BLOCK
    if call.transposed:
        # FP8 matrix instructions need the codes that they sum over contiguous in memory.
        tl.store(call.codes + first + across[None, :] * (blocks * BLOCK) + rows[:, None], codes)
    else:
        tl.store(call.codes + first + rows[:, None] * call.width + across[None, :], codes)
    tl.store(call.scales + (batch * call.heads + head) * blocks + block, scale)


@triton.jit
def attend_codes(call, queries, keys, values):
    """The forward pass over codes. Grid as in `attend_forward`.

    The other arguments are descriptors of tiles of codes [batch * head * row, size], of values [batch * head * size,
    row].
    """
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
    summed, total, top = initial_sums(call, head)
    total *= LIFTED
    for step in range(whole_start, whole_stop):
        key, value, scales = load_tiles(call, keys, values, owner, step)
        summed, total, top = attend_tile(
            call, (query, scale, block), (key, value, scales, step), (summed, total, top), masked=False
        )
    for index in range(whole_start - start + stop - whole_stop):
        step = start + index
        step = tl.where(step < whole_start, step, step - whole_start + whole_stop)
        key, value, scales = load_tiles(call, keys, values, owner, step)
        summed, total, top = attend_tile(
            call, (query, scale, block), (key, value, scales, step), (summed, total, top), masked=True
        )
    finish(call, (batch, head, block, text), (summed / LIFTED, total / LIFTED, top))


@triton.jit
def load_tiles(call, keys, values, owner, step):
    """Load the codes of a tile of keys and of one of values, and their scales."""
    blocks = tl.cdiv(call.shape.keys, BLOCK)
    key = keys.load([owner * blocks * BLOCK + step * call.tile.keys, 0])
    value = values.load([owner * call.tile.value_width, step * call.tile.keys])
    at = owner * blocks + step * call.tile.keys // BLOCK
    return key, value, (tl.load(call.key_scales + at), tl.load(call.value_scales + at))


@triton.jit
def attend_tile(call, here, there, running, masked: tl.constexpr):
    """Attend to one tile of keys; pairs are checked against the mask if `masked`."""
    query, scale, block = here
    key, value, scales, step = there
    summed, total, top = running
    key_scale, value_scale = scales
    products = tl.dot(query, tl.trans(key))
    if masked:
        products = apply_band(call, products, block, step)
    scale *= key_scale
    highest = tl.maximum(top, tl.max(products, 1) * scale)
    # If nothing has been visible yet, subtract 0 instead of -inf, which would give NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(products * scale - (base - LIFT)[:, None])
    rescale = tl.exp2(top - base)
    # The sums of each tile are accumulated in float32: FP8 tensor cores accumulate with less precision.
    part = tl.dot(weights.to(value.dtype), tl.trans(value))
    return summed * rescale[:, None] + part * value_scale, total * rescale + tl.sum(weights, 1), highest
