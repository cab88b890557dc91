"""The forward kernel for band masks on Hopper, in Gluon: one producer warp loads by TMA, two warp groups compute.

Each warp group owns 64 queries. The groups run out of phase, so that one computes exponentials while the other one
multiplies; within a group the products with the next keys overlap the exponentials of the current ones (Shah et al.
2024, arXiv 2407.08608, sections 3.1 and 3.2). Triton's automatic warp specialization (version 3.6) computed wrong
results on an H200.
"""

from __future__ import annotations

from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_kernels_triton.kernels.common import LOG2_E

ROWS = gl.constexpr(64)
"""The number of queries of a warp group (four warps)."""


def laid_out(tiles: Any) -> TensorDescriptor:
    """The TMA descriptor with the shared-memory layout that this kernel uses for tiles of 16-bit elements."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(tiles.base, tiles.shape, tiles.strides, tiles.block_shape, layout)


@gluon.jit
def attend_paired(call, queries, keys, values):
    """The forward pass. Grid as in `attend_dense`; `call.tile.queries` is twice `ROWS`, and `call.stages` tiles of keys
    and values are kept in shared memory."""
    shape = call.shape
    tile_keys: gl.constexpr = call.tile.keys
    key_width: gl.constexpr = call.tile.key_width
    value_width: gl.constexpr = call.tile.value_width
    stages: gl.constexpr = call.stages
    tiles = gl.cdiv(shape.queries, call.tile.queries)
    block = tiles - 1 - gl.program_id(0) % tiles
    batch = gl.program_id(0) // tiles // shape.heads
    head = gl.program_id(0) // tiles % shape.heads
    span = span_of(call, block)
    query_here = gl.allocate_shared_memory(queries.dtype, [2, 1, 1, ROWS, key_width], queries.layout)
    key_here = gl.allocate_shared_memory(keys.dtype, [stages, 1, 1, tile_keys, key_width], keys.layout)
    value_here = gl.allocate_shared_memory(values.dtype, [stages, 1, 1, tile_keys, value_width], values.layout)
    # One barrier for the queries of each group, then for every stage of keys and of values: full, then free.
    barriers = gl.allocate_shared_memory(gl.int64, [2 + 4 * stages, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(2 + 2 * stages):
        mbarrier.init(barriers.index(number), count=1)
    for number in gl.static_range(2 * stages):
        mbarrier.init(barriers.index(2 + 2 * stages + number), count=2)
    here = (query_here, key_here, value_here, barriers)
    who = (batch, head, block)
    gl.warp_specialize(
        [
            (compute, (call, here, who, span, 0)),
            (compute, (call, here, who, span, 1)),
            (fetch, (call, (queries, keys, values), here, who, span)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def span_of(call, block):
    """The range of key tiles that a tile of queries attends to, and of those without masked pairs, see `spans`."""
    shape = call.shape
    first = block * call.tile.queries + shape.keys - shape.queries
    last = first + call.tile.queries - 1
    start = 0
    whole_start = 0
    if call.rule.left is not None:
        start = gl.maximum(first - call.rule.left, 0) // call.tile.keys
        whole_start = gl.cdiv(gl.maximum(last - call.rule.left, 0), call.tile.keys)
    stop = shape.keys
    whole_stop = shape.keys
    if call.rule.right is not None:
        stop = gl.maximum(gl.minimum(last + call.rule.right + 1, shape.keys), 0)
        whole_stop = gl.maximum(gl.minimum(first + call.rule.right + 1, shape.keys), 0)
    stop = gl.maximum(gl.cdiv(stop, call.tile.keys), start)
    whole_stop = gl.minimum(whole_stop // call.tile.keys, stop)
    whole_start = gl.minimum(gl.maximum(whole_start, start), whole_stop)
    return start, whole_start, whole_stop, stop


@gluon.jit
def fetch(call, tiles, here, who, span):
    """The producer: load queries, then keys and values, the last tile first, as stages become free."""
    queries, keys, values = tiles
    query_here, key_here, value_here, barriers = here
    batch, head, block = who
    stages: gl.constexpr = call.stages
    owner = head // call.shape.group
    count = span[3] - span[0]
    if count > 0:
        for group in gl.static_range(2):
            barrier = barriers.index(group)
            mbarrier.expect(barrier, queries.block_type.nbytes)
            row = block * call.tile.queries + group * ROWS
            tma.async_copy_global_to_shared(queries, [batch, head, row, 0], barrier, query_here.index(group))
    for step in range(count):
        stage = step % stages
        phase = (step // stages) & 1
        row = (span[3] - 1 - step) * call.tile.keys
        barrier = barriers.index(2 + stage)
        mbarrier.wait(barriers.index(2 + 2 * stages + stage), phase ^ 1)
        mbarrier.expect(barrier, keys.block_type.nbytes)
        tma.async_copy_global_to_shared(keys, [batch, owner, row, 0], barrier, key_here.index(stage))
        barrier = barriers.index(2 + stages + stage)
        mbarrier.wait(barriers.index(2 + 3 * stages + stage), phase ^ 1)
        mbarrier.expect(barrier, values.block_type.nbytes)
        tma.async_copy_global_to_shared(values, [batch, owner, row, 0], barrier, value_here.index(stage))


@gluon.jit
def compute(call, here, who, span, group: gl.constexpr):
    """A consumer: attend `ROWS` queries to the tiles of a span, the last one first."""
    batch, head, block = who
    start, whole_start, whole_stop, stop = span
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.tile.keys, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.tile.value_width, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    total = gl.zeros([ROWS], gl.float32, row_layout)
    top = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    if call.rule.sinks is not None:
        total += 1.0
        top = gl.zeros([ROWS], gl.float32, row_layout) + gl.load(call.rule.sinks + head) * LOG2_E
    summed = gl.zeros([ROWS, call.tile.value_width], gl.float32, sum_layout)
    first = block * call.tile.queries + group * ROWS
    if stop > start:
        query_here, _, _, barriers = here
        stages: gl.constexpr = call.stages
        mbarrier.wait(barriers.index(group), 0)
        query = query_here.index(group).reshape([ROWS, call.tile.key_width])
        products = start_scores(call, query, here, 0)
        products = warpgroup_mma_wait(0, deps=[products])
        mbarrier.arrive(barriers.index(2 + 2 * stages), count=1)
        unnormalized, _, total, top = softmax_step(call, products, (first, stop - 1), (total, top), masked=True)
        running = (weights_of(call, unnormalized, sum_layout), summed, total, top)
        # Partly masked tiles at the end, then unmasked tiles, then partly masked tiles at the start.
        edge = gl.maximum(stop - whole_stop, 1)
        running = walk(call, here, query, running, (first, 1, edge, stop), masked=True)
        whole = gl.maximum(stop - whole_start, edge)
        running = walk(call, here, query, running, (first, edge, whole, stop), masked=False)
        if call.rule.left is not None:
            running = walk(call, here, query, running, (first, whole, stop - start, stop), masked=True)
        weights, summed, total, top = running
        summed = warpgroup_mma_wait(0, deps=[start_outputs(call, here, weights, summed, stop - start - 1)])
    finish(call, (batch, head, first), summed, total, top)


@gluon.jit
def start_scores(call, query, here, step):
    """Start the asynchronous product of queries and the keys of a step."""
    _, key_here, _, barriers = here
    stages: gl.constexpr = call.stages
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.tile.keys, 16])
    stage = step % stages
    mbarrier.wait(barriers.index(2 + stage), (step // stages) & 1)
    key = key_here.index(stage).reshape([call.tile.keys, call.tile.key_width])
    nothing = gl.zeros([ROWS, call.tile.keys], gl.float32, score_layout)
    return warpgroup_mma(query, key.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def start_outputs(call, here, weights, summed, step):
    """Start the asynchronous product of weights and the values of a step, added to `summed`."""
    _, _, value_here, barriers = here
    stages: gl.constexpr = call.stages
    stage = step % stages
    mbarrier.wait(barriers.index(2 + stages + stage), (step // stages) & 1)
    value = value_here.index(stage).reshape([call.tile.keys, call.tile.value_width])
    return warpgroup_mma(weights, value, summed, is_async=True)


@gluon.jit
def walk(call, here, query, running, steps, masked: gl.constexpr):
    """Attend to the tiles of a range of steps.

    Both products of an iteration are in flight at once. The assembler places the exponentials behind the second wait,
    where they overlap the products of the other group; if it is forced to place them earlier, it waits for each matrix
    instruction.
    """
    weights, summed, total, top = running
    first, begin, end, stop = steps
    _, _, _, barriers = here
    stages: gl.constexpr = call.stages
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.tile.value_width, 16])
    for step in range(begin, end):
        products = start_scores(call, query, here, step)
        outputs = start_outputs(call, here, weights, summed, step - 1)
        products = warpgroup_mma_wait(1, deps=[products])
        mbarrier.arrive(barriers.index(2 + 2 * stages + step % stages), count=1)
        unnormalized, rescale, total, top = softmax_step(call, products, (first, stop - 1 - step), (total, top), masked)
        summed, weights = warpgroup_mma_wait(0, deps=[outputs, weights_of(call, unnormalized, sum_layout)])
        mbarrier.arrive(barriers.index(2 + 3 * stages + (step - 1) % stages), count=1)
        summed = summed * gl.convert_layout(rescale, gl.SliceLayout(1, sum_layout))[:, None]
    return weights, summed, total, top


@gluon.jit
def softmax_step(call, products, place, running, masked: gl.constexpr):
    """A step of the online softmax: unnormalized weights of a tile, the factor for earlier sums, total and maximum."""
    total, top = running
    if masked:
        products = apply_band(call, products, place)
    scale = call.rule.scale * LOG2_E
    highest = gl.maximum(top, gl.max(products, 1) * scale)
    base = highest
    if masked:
        # If nothing has been visible yet, subtract 0 instead of -inf, which would give NaN.
        base = gl.where(highest == float("-inf"), 0.0, highest)
    unnormalized = gl.exp2(products * scale - base[:, None])
    rescale = gl.exp2(top - base)
    return unnormalized, rescale, total * rescale + gl.sum(unnormalized, 1), highest


@gluon.jit
def weights_of(call, unnormalized, sum_layout: gl.constexpr):
    """The weights in the dtype and register layout of a matrix operand."""
    return gl.convert_layout(unnormalized.to(call.out.data.dtype.element_ty), gl.DotOperandLayout(0, sum_layout, 2))


@gluon.jit
def apply_band(call, products, place):
    """The products with -inf where a query does not see a key."""
    first, step = place
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.tile.keys, 16])
    shape = call.shape
    column = gl.arange(0, call.tile.keys, gl.SliceLayout(0, score_layout))[None, :]
    at = first + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout)) + shape.keys - shape.queries
    last = gl.zeros_like(at) + shape.keys - 1
    if call.rule.right is not None:
        last = gl.minimum(at + call.rule.right, last)
    products = gl.where(column <= (last - step * call.tile.keys)[:, None], products, float("-inf"))
    if call.rule.left is not None:
        least = at - call.rule.left - step * call.tile.keys
        products = gl.where(column >= least[:, None], products, float("-inf"))
    return products


@gluon.jit
def finish(call, place, summed, total, top):
    """Write the output, with zeros for queries that saw no key, and lse."""
    batch, head, first = place
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.tile.value_width, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, sum_layout)
    lse = gl.convert_layout(top + gl.log2(total), row_layout)
    total = gl.convert_layout(total, row_layout)
    out = summed / gl.where(total == 0.0, 1.0, total)[:, None]
    rows = first + gl.arange(0, ROWS, row_layout)
    across = gl.arange(0, call.tile.value_width, gl.SliceLayout(0, sum_layout))
    view = call.out
    start = view.data + gl.cast(batch, gl.int64) * view.batch + gl.cast(head, gl.int64) * view.head
    inside = (rows[:, None] < call.shape.queries) & (across[None, :] < call.tile.value_size)
    gl.store(start + rows[:, None] * view.row + across[None, :], out.to(view.data.dtype.element_ty), mask=inside)
    if call.lse is not None:
        line = call.lse + gl.cast(batch * call.shape.heads + head, gl.int64) * call.shape.queries
        gl.store(line + rows, lse, mask=rows < call.shape.queries)
