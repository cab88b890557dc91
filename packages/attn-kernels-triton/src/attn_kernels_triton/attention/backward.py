"""Launching the backward kernels of attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_kernels_triton.attention.forward import Attended, Inputs, copied, described
from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.tiles import (
    DENSE_BACKWARD,
    DENSE_BACKWARD_BOUNDED,
    NARROWEST,
    Choice,
    choice_of,
    no_larger,
    tile_of,
)
from attn_kernels_triton.attention.varlen import Listed, whole_texts
from attn_kernels_triton.kernels.arguments import NO_BLOCKS, NO_TILE, Backward, Diagonals, Padded
from attn_kernels_triton.kernels.attention_backward import attend_delta, gradient_to_keys, gradient_to_queries
from attn_kernels_triton.kernels.attention_backward_bias import gradient_to_biases
from attn_kernels_triton.kernels.attention_backward_tma import (
    gradient_to_dense_keys,
    gradient_to_dense_queries,
    pad,
)
from attn_kernels_triton.launch import Launch, laid_like, rows
from attn_kernels_triton.tuning.candidates import kind_of
from attn_kernels_triton.tuning.store import known


class Backwards(NamedTuple):
    """The tensors that the backward kernels read and write.

    `change` is the gradient of the output, `delta` [batch, heads, query], float32, its products with the output.
    """

    inputs: Inputs
    result: Attended
    change: Tensor
    delta: Tensor
    gradients: Inputs


class Gradients(NamedTuple):
    """The gradients of the inputs, and of sinks and biases where they need one."""

    inputs: Inputs
    sink: Tensor | None
    bias: Tensor | None


def call_of(plan: Plan, work: Backwards) -> Backward:
    """The argument fields that all backward kernels share."""
    return Backward(
        query=rows(work.inputs.query),
        key=rows(work.inputs.key),
        value=rows(work.inputs.value),
        out=rows(work.change),
        lse=work.result.lse,
        delta=work.delta,
        first=None,
        second=None,
        shape=plan.shape,
        rule=plan.rule,
        places=plan.places,
        blocks=NO_BLOCKS,
        tile=NO_TILE,
        dropout=plan.dropped,
    )


PADDED = 128
"""The multiple to which lse and delta are padded, so that every kernel reads whole tiles."""


def chosen_backward(plan: Plan, device: torch.device) -> tuple[Choice, ...]:
    """The launch parameters of the TMA backward kernels: measured, else the default."""
    bounded = plan.rule.left is not None or plan.rule.right is not None
    shipped = DENSE_BACKWARD_BOUNDED if bounded else DENSE_BACKWARD
    measured: tuple[Choice, ...] | None = known(tuple, kind_of(plan.sizes, plan.rule).backward, device)
    return tuple(no_larger(choice, plan.sizes) for choice in measured or shipped[max(NARROWEST, plan.sizes.width)])


class Dense(NamedTuple):
    """A backward pass by TMA, with padded `lse` and `delta` [batch * head, row]."""

    plan: Plan
    work: Backwards
    lse: Tensor
    delta: Tensor

    @property
    def call(self) -> Backward:
        """The argument fields that all kernels share."""
        return call_of(self.plan, self.work)._replace(padded=Padded(self.lse, self.delta, self.lse.shape[1]))

    def tiles(self, choice: Choice) -> tuple[TensorDescriptor, ...]:
        """TMA descriptors of queries, the gradient of the output, lse, delta, keys and values."""
        inputs = self.work.inputs
        lines = (TensorDescriptor.from_tensor(line, [1, choice.queries]) for line in (self.lse, self.delta))
        query_side = described(inputs.query, choice.queries), described(self.work.change, choice.queries)
        return *query_side, *lines, described(inputs.key, choice.keys), described(inputs.value, choice.keys)


def dense_launches(plan: Plan, work: Backwards, choices: tuple[Choice, ...]) -> list[Launch]:
    """The launches in order: one that writes `delta`, one that owns queries, one that owns keys."""
    batch, heads, queries = work.result.lse.shape
    kept = work.result.lse.new_empty(2, batch * heads, -(-queries // PADDED) * PADDED)
    dense = Dense(plan, work, kept[0], kept[1])
    by_query, by_key = choices
    return [pad_launch(dense), query_launch(dense, by_query), key_launch(dense, by_key)]


def pad_launch(dense: Dense) -> Launch:
    """The launch that writes delta and the padded lse and delta, in tiles of `PADDED` rows."""
    tile = tile_of(Choice(PADDED, PADDED, 8, 1), dense.plan.sizes)
    call = dense.call._replace(second=rows(dense.work.result.out), tile=tile)
    count = dense.lse.numel() // PADDED
    return Launch(program=pad, programs=count, call=call, warps=8, stages=1)


def query_launch(dense: Dense, choice: Choice) -> Launch:
    """The launch of the kernel that owns queries and writes their gradient."""
    call = dense.call._replace(first=rows(dense.work.gradients.query), tile=tile_of(choice, dense.plan.sizes))
    count = -(-dense.plan.shape.queries // choice.queries) * dense.plan.batch * dense.plan.shape.heads
    return launched(gradient_to_dense_queries, count, call, dense, choice)


def key_launch(dense: Dense, choice: Choice) -> Launch:
    """The launch of the kernel that owns keys and writes the gradients of keys and values."""
    shape = dense.plan.shape
    count = -(-shape.keys // choice.keys) * dense.plan.batch * (shape.heads // shape.group)
    return launched(gradient_to_dense_keys, count, to_keys(dense, choice), dense, choice)


def to_keys(dense: Dense, choice: Choice) -> Backward:
    """The argument of kernels that write the gradients of keys and values."""
    found = dense.work.gradients
    return dense.call._replace(first=rows(found.key), second=rows(found.value), tile=tile_of(choice, dense.plan.sizes))


def launched(program: object, count: int, call: Backward, dense: Dense, choice: Choice) -> Launch:
    """The launch of a kernel over TMA descriptors."""
    tiles = dense.tiles(choice)
    return Launch(program=program, programs=count, call=call, warps=choice.warps, stages=choice.stages, tiles=tiles)


SLICES = 8
"""The largest number of partial sums per diagonal, so that more programs work in parallel."""


class Extent(NamedTuple):
    """The diagonals of tiles with visible pairs, `first` to `stop`, and those among them whose biases differ from pair
    to pair, `near` to `near_stop`."""

    first: int
    stop: int
    near: int
    near_stop: int


def extent_of(plan: Plan, far: int, side: int) -> Extent:
    """The diagonals of square tiles of size `side`, where biases differ for distances below `far`."""
    # Distances key - query range from -before to after; a tile of diagonal d has those within side - 1 of d * side.
    before, after = max(plan.sizes.keys - 1, 0), max(plan.sizes.queries - 1, 0)
    if plan.rule.left is not None:
        before = min(before, plan.rule.left)
    if plan.rule.right is not None:
        after = min(after, plan.rule.right)
    first, stop = -((before + side - 1) // side), (after + side - 1) // side + 1
    reach = (far + side - 1) // side
    return Extent(first, stop, max(first, min(-reach, stop)), min(stop, max(reach + 1, first)))


def bias_launch(plan: Plan, backward: Backward, far: int) -> tuple[Launch, Extent]:
    """The launch that sums gradients of scores by diagonals, and its extent; `backward` is the shared argument."""
    choice = choice_of("to_biases", plan.sizes)
    side = max(choice.queries, choice.keys)
    choice = choice._replace(queries=side, keys=side)
    extent, device, heads = extent_of(plan, far, side), backward.delta.device, plan.shape.heads
    number = plan.batch if plan.texts is None else len(plan.texts)
    slices = max(1, min(SLICES, number))
    count, near = extent.stop - extent.first, extent.near_stop - extent.near
    texts = None if plan.texts is None else whole_texts(plan.texts, device)
    diagonals = Diagonals(
        first=extent.first,
        count=count,
        near=extent.near,
        near_stop=extent.near_stop,
        number=number,
        slices=slices,
        sums=torch.empty(slices, heads, near, side, side, device=device),
        far=torch.zeros(slices, heads, count, device=device),
    )
    tile = tile_of(choice, plan.sizes)
    call = backward._replace(blocks=plan.by_pair, tile=tile, texts=texts, diagonals=diagonals)
    programs = slices * heads * count if number else 0
    launch = Launch(program=gradient_to_biases, programs=programs, call=call, warps=choice.warps, stages=choice.stages)
    return launch, extent


def to_bias(found: Diagonals, extent: Extent, far: int) -> Tensor:
    """The gradient [heads, 2 far + 1] of the biases from the sums `found` of the kernel."""
    sums, rest = found.sums.sum(0), found.far.sum(0)
    heads, near, side, _ = sums.shape
    # Flattened and viewed with rows one element shorter, each row is shifted by one: columns are then distances.
    wide = torch.nn.functional.pad(sums.flip(2), (0, side)).flatten(2)[..., : side * (2 * side - 1)]
    by_distance = wide.reshape(heads, near, side, 2 * side - 1).sum(2)
    least = min(-far, extent.near * side - (side - 1))
    line = rest.new_zeros(heads, max(far, extent.near_stop * side) - least + 1)
    for place in range(near):
        start = (extent.near + place) * side - (side - 1) - least
        line[:, start : start + 2 * side - 1] += by_distance[:, place]
    total: Tensor = line[:, -far - least : far - least + 1].clone()
    total[:, 0] += line[:, : -far - least].sum(1) + rest[:, : extent.near - extent.first].sum(1)
    total[:, -1] += line[:, far - least + 1 :].sum(1) + rest[:, extent.near_stop - extent.first :].sum(1)
    return total


WIDEST_DENSE = max(DENSE_BACKWARD)
"""The largest head width for the TMA backward kernels, which accumulate two gradients in registers."""


def backward(plan: Plan, inputs: Inputs, result: Attended, change: Tensor) -> Gradients:
    """All gradients, given that of the output, `change`, which is copied if its layout differs from the output's."""
    change = laid_like(change, result.out)
    work = Backwards(inputs, result, change, torch.empty_like(result.lse), Inputs(*map(torch.empty_like, inputs)))
    for launch in backward_launches(plan, work):
        launch.run(change.device)
    return Gradients(work.gradients, to_sink(plan, result.lse, work.delta), to_biases(plan, work))


def backward_launches(plan: Plan, work: Backwards) -> list[Launch]:
    """The launches of the backward pass in order, by TMA if that is supported, else by pointers."""
    if plan.sizes.width <= WIDEST_DENSE and copied(plan, *work.inputs, work.change):
        return dense_launches(plan, work, chosen_backward(plan, work.change.device))
    return pointer_launches(plan, work)


def pointer_launches(plan: Plan, work: Backwards) -> list[Launch]:
    """The launches of the backward kernels that read tiles by pointers."""
    by_query, by_key = choice_of("to_queries", plan.sizes), choice_of("to_keys", plan.sizes)
    device, heads, shared = work.change.device, plan.shape.heads, plan.shape.heads // plan.shape.group
    queries, texts_by_query = plan.tiles(Listed(by_query.queries, by_key=False), device)
    keys, texts_by_key = plan.tiles(Listed(by_key.keys, by_key=True), device)
    shared_call = call_of(plan, work)
    start = shared_call._replace(second=rows(work.result.out), tile=tile_of(by_query, plan.sizes), texts=texts_by_query)
    to_query = start._replace(first=rows(work.gradients.query), second=None, blocks=plan.by_query)
    to_key = shared_call._replace(
        first=rows(work.gradients.key),
        second=rows(work.gradients.value),
        blocks=plan.by_key,
        tile=tile_of(by_key, plan.sizes),
        texts=texts_by_key,
    )
    return [
        Launch(program=attend_delta, programs=queries * heads, call=start, warps=by_query.warps, stages=1),
        Launch(
            program=gradient_to_queries,
            programs=queries * heads,
            call=to_query,
            warps=by_query.warps,
            stages=by_query.stages,
        ),
        Launch(program=gradient_to_keys, programs=keys * shared, call=to_key, warps=by_key.warps, stages=by_key.stages),
    ]


def to_biases(plan: Plan, work: Backwards) -> Tensor | None:
    """The gradient [heads, 2 far + 1] of the biases, None if they need none; `delta` must have been computed."""
    if plan.bias is None or not plan.bias.requires_grad:
        return None
    far = plan.bias.shape[1] // 2
    launch, extent = bias_launch(plan, call_of(plan, work), far)
    launch.run(work.change.device)
    return to_bias(launch.call.diagonals, extent, far)


def to_sink(plan: Plan, lse: Tensor, delta: Tensor) -> Tensor | None:
    """The gradient [heads] of the sink logit, -Σ (sink's share · delta) over batch and queries; None without a sink."""
    if plan.sink is None:
        return None
    share = torch.exp2(plan.sink[:, None] / math.log(2) - lse)
    return -(share * delta).sum((0, 2))
