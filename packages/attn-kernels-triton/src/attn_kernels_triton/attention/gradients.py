"""What the backward programs are given and what they give."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attn_kernels_triton.attention.forward import Attended, Inputs
from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.kernels.arguments import NO_BLOCKS, NO_TILE, Backward
from attn_kernels_triton.launch import rows


class Backwards(NamedTuple):
    """What the backward programs read and write: the gradient to the output, and `delta` [batch, heads, query]."""

    inputs: Inputs
    result: Attended
    change: Tensor
    delta: Tensor
    gradients: Inputs


class Gradients(NamedTuple):
    """Gradients to the inputs, and to sinks and biases where there are any."""

    inputs: Inputs
    sink: Tensor | None
    bias: Tensor | None


def call_of(plan: Plan, work: Backwards) -> Backward:
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
        tile=NO_TILE,
        dropout=plan.dropped,
    )
