"""Gated activations."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from attn_core.errors import InvalidValue
from attn_core.first_order import first_order_only
from attn_core.kernels.rowwise import GATE, ROW_FORMS, Activation
from torch import Tensor

from attn_kernels_triton.kernels.rowwise import NO_MATRIX, Gate, gate_rows, ungate_rows
from attn_kernels_triton.launch import Launch, laid, laid_like, specialized, warm_up_backward
from attn_kernels_triton.rowwise.rows import check_rows, check_same, flat, gate_tile, matrix

WARPS = 8


def gate_launch(gate: Tensor, up: Tensor, out: Tensor, activation: Activation) -> Launch:
    """The launch of the forward kernel over tensors [row, size]."""
    size = gate.shape[1]
    call = Gate(
        gate=matrix(gate),
        up=matrix(up),
        out=matrix(out),
        change=NO_MATRIX,
        first=NO_MATRIX,
        second=NO_MATRIX,
        count=gate.shape[0],
        activation=tl.constexpr(activation),
        tile=gate_tile(size),
    )
    return Launch(program=gate_rows, programs=programs_of(gate), call=call, warps=WARPS, stages=1)


def ungate_launch(given: tuple[Tensor, Tensor, Tensor], found: tuple[Tensor, Tensor], activation: Activation) -> Launch:
    """The launch of the backward kernel over gate, up and the gradient of the output; writes the two gradients
    `found`."""
    gate, up, change = given
    call = Gate(
        gate=matrix(gate),
        up=matrix(up),
        out=NO_MATRIX,
        change=matrix(change),
        first=matrix(found[0]),
        second=matrix(found[1]),
        count=gate.shape[0],
        activation=tl.constexpr(activation),
        tile=gate_tile(gate.shape[1]),
    )
    return Launch(program=ungate_rows, programs=programs_of(gate), call=call, warps=WARPS, stages=1)


def programs_of(rows: Tensor) -> int:
    """The grid size: blocks of rows times parts of a row."""
    tile = gate_tile(rows.shape[1])
    blocks, parts = -(-rows.shape[0] // tile.rows.value), -(-rows.shape[1] // tile.width.value)
    return int(blocks * parts)


class Gated(torch.autograd.Function):
    """The gated activation of `gate` and `up` [row, size], which are all that is saved for the gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """Run the forward kernel."""
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        gate_launch(gate, up, out, activation).run(gate.device)
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, Tensor, None]:
        """Run the backward kernel."""
        gate, up = ctx.saved_tensors
        return *ungated(gate, up, flat(change), ctx.activation), None


def ungated(gate: Tensor, up: Tensor, change: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The gradients of `gate` and `up` [row, size], given that of the output, `change` [row, size]."""
    first, second = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    ungate_launch((gate, up, laid_like(change, first)), (first, second), activation).run(gate.device)
    return first, second


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """See `attn_core.GateKernel.gated`; raises `InvalidValue` for unknown activations, and see `rowwise.rows`."""
    check_rows("gate", gate)
    check_same("up", up, gate)
    if activation not in ROW_FORMS[GATE]:
        raise InvalidValue.of("activation", activation, ", ".join(ROW_FORMS[GATE]))
    given = flat(gate), flat(up)
    kind = "gate", activation, gate.dtype, gate.shape[-1], *specialized(given[0].shape[0]), *laid(*given)
    warm_up_backward(given, kind, lambda: ungated(*given, torch.zeros_like(given[0]), activation))
    out: Tensor = Gated.apply(*given, activation)  # type: ignore[no-untyped-call]
    return out.view(gate.shape)
