"""Launching the backward programs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_kernels_triton.attention.dense import copied
from attn_kernels_triton.attention.dense_backward import dense_launches
from attn_kernels_triton.attention.diagonals import bias_launch, to_bias
from attn_kernels_triton.attention.forward import Attended, Inputs
from attn_kernels_triton.attention.gradients import Backwards, Gradients, call_of
from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.texts import Listed
from attn_kernels_triton.attention.tiles import DENSE_BACKWARD, choice_of, tile_of
from attn_kernels_triton.kernels.backward_key import gradient_to_keys
from attn_kernels_triton.kernels.backward_query import attend_delta, gradient_to_queries
from attn_kernels_triton.launch import Launch, addressable, rows
from attn_kernels_triton.tuning.chosen import chosen_backward

WIDEST_DENSE = max(DENSE_BACKWARD)
"""The width of heads up to which sums of two gradients fit registers beside tiles that the chip copies."""


def backward(plan: Plan, inputs: Inputs, result: Attended, change: Tensor) -> Gradients:
    """The gradients of a gradient to the output."""
    change = addressable(change)
    work = Backwards(inputs, result, change, torch.empty_like(result.lse), Inputs(*map(torch.empty_like, inputs)))
    for launch in backward_launches(plan, work):
        launch.run(change.device)
    return Gradients(work.gradients, to_sink(plan, result.lse, work.delta), to_biases(plan, work))


def backward_launches(plan: Plan, work: Backwards) -> list[Launch]:
    """The programs in the order in which they run."""
    if plan.sizes.width <= WIDEST_DENSE and copied(plan, *work.inputs, work.change):
        return dense_launches(plan, work, chosen_backward(plan, work.change.device))
    return pointer_launches(plan, work)


def pointer_launches(plan: Plan, work: Backwards) -> list[Launch]:
    """Programs whose threads read tiles themselves."""
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
    """The gradient [heads, 2 far + 1] to the biases; `delta` must have been computed."""
    if plan.bias is None or not plan.bias.requires_grad:
        return None
    far = plan.bias.shape[1] // 2
    launch, extent = bias_launch(plan, call_of(plan, work), far)
    launch.run(work.change.device)
    return to_bias(launch.call.diagonals, extent, far)


def to_sink(plan: Plan, lse: Tensor, delta: Tensor) -> Tensor | None:
    """The gradient [heads] to the sink: minus its share of each query, times what the others give."""
    if plan.sink is None:
        return None
    share = torch.exp2(plan.sink[:, None] / math.log(2) - lse)
    return -(share * delta).sum((0, 2))
