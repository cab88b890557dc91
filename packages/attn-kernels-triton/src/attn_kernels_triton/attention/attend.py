"""Softmax attention with gradients, as an autograd function."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.first_order import first_order_only
from attn_core.kernels.attend import texts
from attn_core.masks import band_of
from torch import Tensor

from attn_kernels_triton.attention.backward import backward
from attn_kernels_triton.attention.forward import Attended, Inputs, empty, forward_launch, inputs_of
from attn_kernels_triton.attention.plan import Plan, plan_of
from attn_kernels_triton.checks import check
from attn_kernels_triton.launch import laid, power_of_two, specialized, warm_up_backward

LONGEST_TILE = 128
"""The largest number of rows in a tile: longer lengths differ only in whether they are a multiple of it."""


class Attend(torch.autograd.Function):
    """The output and the base-2 lse of a plan; gradients flow to queries, keys, values, the sink and the biases."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *learned: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the forward kernel over the last three tensors; the first two are the sink and the biases of the plan."""
        inputs: tuple[Any, ...] = learned[2:]
        result = empty(plan, Inputs(*inputs))
        forward_launch(plan, Inputs(*inputs), result).run(inputs[0].device)
        ctx.plan = dataclasses.replace(plan, sink=apart(plan.sink), bias=apart(plan.bias))
        ctx.save_for_backward(*inputs, *result)
        ctx.mark_non_differentiable(result.lse)
        return result.out, result.lse

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward kernels."""
        saved = ctx.saved_tensors
        found = backward(ctx.plan, Inputs(*saved[:3]), Attended(*saved[3:]), change)
        return None, found.sink, found.bias, *found.inputs


def apart(learned: Tensor | None) -> Tensor | None:
    """The tensor detached from its graph, with the same `requires_grad`."""
    return None if learned is None else learned.detach().requires_grad_(learned.requires_grad)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size] in the dtype of the values; raises `InvalidValue`, see `checks`."""
    return attend_with_lse(spec, operands)[0]


def attend_with_lse(spec: AttentionSpec, operands: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The output, and the natural log-sum-exp of each query's logits with the sink's [batch, heads, query], float32.

    The log-sum-exp carries no gradient.
    """
    check(spec, operands)
    if operands.varlen is not None and band_of(spec.mask) is None:
        # The block lists of masks that are not bands depend on the length of each text.
        parts = [attend_with_lse(spec, text) for text in texts(operands)]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)
    plan = plan_of(spec, operands)
    inputs = inputs_of(operands)
    warm_up_backward(
        (*inputs, plan.sink, plan.bias), (*backward_kind(plan), *laid(*inputs)), lambda: back_over_zeros(plan, inputs)
    )
    out, lse = Attend.apply(plan, plan.sink, plan.bias, *inputs)  # type: ignore[no-untyped-call]
    return out, lse * math.log(2)


def back_over_zeros(plan: Plan, inputs: Inputs) -> None:
    """Run the backward kernels over a result and a gradient of zeros."""
    result = Attended(*map(torch.zeros_like, empty(plan, inputs)))
    backward(plan, inputs, result, torch.zeros_like(result.out))


def backward_kind(plan: Plan) -> tuple[Hashable, ...]:
    """Everything that the backward kernels of a plan are specialized on, except the layout of tensors."""
    sizes, rule = plan.sizes, plan.rule
    lengths = [(min(power_of_two(length), LONGEST_TILE), length % LONGEST_TILE == 0) for length in sizes[3:5]]
    numbers = (specialized(number) for number in (sizes.queries, sizes.keys, rule.left, rule.right, plan.shape.group))
    given = (part is None for part in (*plan.places, rule.cap, rule.slopes, rule.sinks, plan.lists, plan.texts))
    learned = plan.bias is not None and plan.bias.requires_grad
    return "attention", sizes._replace(queries=0, keys=0), *lengths, *numbers, *given, learned
