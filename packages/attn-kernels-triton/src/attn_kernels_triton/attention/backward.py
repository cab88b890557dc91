"""Launching the backward programs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attn_kernels_triton.attention.forward import Attended, Inputs
from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.tiles import Choice, choice_of, tile_of
from attn_kernels_triton.launch import Launch, rows
from attn_kernels_triton.programs.arguments import NO_BLOCKS, Backward
from attn_kernels_triton.programs.backward_key import gradient_to_keys
from attn_kernels_triton.programs.backward_query import attend_delta, gradient_to_queries


class Backwards(NamedTuple):
    """What the backward programs read and write: the gradient to the output, and `delta` [batch, heads, query]."""

    inputs: Inputs
    result: Attended
    change: Tensor
    delta: Tensor
    gradients: Inputs


def backward(plan: Plan, inputs: Inputs, result: Attended, change: Tensor) -> tuple[Inputs, Tensor | None]:
    """Gradients to the inputs, and to the sink where there is one, of a gradient to the output."""
    change = change if change.stride(3) == 1 else change.contiguous()
    work = Backwards(inputs, result, change, torch.empty_like(result.lse), Inputs(*map(torch.empty_like, inputs)))
    for launch in backward_launches(plan, work):
        launch.run(change.device)
    return work.gradients, to_sink(plan, result.lse, work.delta)


def backward_launches(plan: Plan, work: Backwards) -> list[Launch]:
    """The programs in the order in which they run."""
    queries = -(-plan.sizes.queries // (by_query := choice_of("to_queries", plan.sizes)).queries)
    keys = -(-plan.sizes.keys // (by_key := choice_of("to_keys", plan.sizes)).keys)
    heads, shared = plan.batch * plan.shape.heads, plan.batch * (plan.shape.heads // plan.shape.group)
    start = call_of(plan, work, by_query)._replace(second=rows(work.result.out))
    to_query = start._replace(first=rows(work.gradients.query), second=None, blocks=plan.by_query)
    to_key = call_of(plan, work, by_key)._replace(
        first=rows(work.gradients.key), second=rows(work.gradients.value), blocks=plan.by_key
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


def call_of(plan: Plan, work: Backwards, choice: Choice) -> Backward:
    """What the programs have in common."""
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
        tile=tile_of(choice, plan.sizes),
    )


def to_sink(plan: Plan, lse: Tensor, delta: Tensor) -> Tensor | None:
    """The gradient [heads] to the sink: minus its share of each query, times what the others give."""
    if plan.sink is None:
        return None
    share = torch.exp2(plan.sink[:, None] / math.log(2) - lse)
    return -(share * delta).sum((0, 2))
