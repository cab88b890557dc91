"""Attention of the softmax family, with gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from attn_core import AttentionSpec, Operands
from torch import Tensor
from torch.autograd.function import once_differentiable

from attn_kernels_triton.attention.backward import backward
from attn_kernels_triton.attention.checks import check
from attn_kernels_triton.attention.forward import Attended, Inputs, empty, forward_launch, inputs_of
from attn_kernels_triton.attention.plan import Plan, plan_of


class Attend(torch.autograd.Function):
    """Output and lse to the base 2 of a plan; gradients to queries, keys, values and the sink."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, sink: Tensor | None, *inputs: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        """Run the forward program."""
        result = empty(plan, Inputs(*inputs))
        forward_launch(plan, Inputs(*inputs), result).run(inputs[0].device)
        ctx.plan = dataclasses.replace(plan, sink=None if plan.sink is None else plan.sink.detach())
        ctx.save_for_backward(*inputs, *result)
        ctx.mark_non_differentiable(result.lse)
        return result.out, result.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward programs."""
        saved = ctx.saved_tensors
        found, sink = backward(ctx.plan, Inputs(*saved[:3]), Attended(*saved[3:]), change)
        return None, sink, *found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(spec: AttentionSpec, operands: Operands) -> Tensor:
    """The output [batch, query, heads, value_size] in the type of the values; raises `InvalidValue`, see `checks`."""
    return attend_with_lse(spec, operands)[0]


def attend_with_lse(spec: AttentionSpec, operands: Operands) -> tuple[Tensor, Tensor]:
    """The output, and ln Σ exp(e) over what a query sees, sinks among it: [batch, heads, query], float32.

    The second carries no gradient.
    """
    check(spec, operands)
    plan = plan_of(spec, operands)
    out, lse = Attend.apply(plan, plan.sink, *inputs_of(operands))  # type: ignore[no-untyped-call]
    return out, lse * math.log(2)
