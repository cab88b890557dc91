"""Launching the forward program."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core import Operands
from torch import Tensor

from attn_kernels_triton.attention.dense import copied, tiles_of
from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.texts import Listed
from attn_kernels_triton.attention.tiles import Choice, choice_of, tile_of
from attn_kernels_triton.kernels.arguments import Forward
from attn_kernels_triton.kernels.dense import attend_dense, attend_specialised
from attn_kernels_triton.kernels.forward import attend_forward
from attn_kernels_triton.launch import Launch, rows
from attn_kernels_triton.tuning.chosen import chosen

PROGRAMS = {"pointers": attend_forward, "descriptors": attend_dense, "specialised": attend_specialised}
"""By how they read keys and values."""


class Inputs(NamedTuple):
    """Queries [batch, query, heads, key_size], keys and values [batch, key, key_value_heads, size]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Attended(NamedTuple):
    """The output [batch, query, heads, value_size], and to the base 2 the logarithm of the sum of exponentials [batch,
    heads, query], float32."""

    out: Tensor
    lse: Tensor


def inputs_of(operands: Operands) -> Inputs:
    """What gradients flow to."""
    return Inputs(operands.query, operands.key, operands.value)


def empty(plan: Plan, inputs: Inputs) -> Attended:
    """Where the forward program writes."""
    batch, queries, heads, _ = inputs.query.shape
    out = inputs.query.new_empty(batch, queries, heads, plan.sizes.value_size)
    return Attended(out, inputs.query.new_empty(batch, heads, queries, dtype=torch.float32))


def forward_launch(plan: Plan, inputs: Inputs, result: Attended) -> Launch:
    """The forward program, which fills `result`."""
    if copied(plan, *inputs):
        return launch_of(plan, inputs, result, chosen(plan, inputs.query.device))
    return launch_of(plan, inputs, result, choice_of("forward", plan.sizes))


def launch_of(plan: Plan, inputs: Inputs, result: Attended, choice: Choice) -> Launch:
    """The forward program of a choice."""
    tiles, texts = plan.tiles(Listed(choice.queries, by_key=False), inputs.query.device)
    call = Forward(
        query=rows(inputs.query),
        key=rows(inputs.key),
        value=rows(inputs.value),
        out=rows(result.out),
        lse=result.lse,
        shape=plan.shape,
        rule=plan.rule,
        places=plan.places,
        blocks=plan.by_query,
        tile=tile_of(choice, plan.sizes),
        texts=texts,
        dropout=plan.dropped,
    )
    return Launch(
        program=PROGRAMS[choice.schedule],
        programs=tiles * plan.shape.heads,
        call=call,
        warps=choice.warps,
        stages=choice.stages,
        tiles=tiles_of(choice, *inputs),
        scratch=choice.schedule == "specialised",
    )
