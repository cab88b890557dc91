"""f(gate) ⊙ up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attn_core.kernels.rowwise import Activation, GateKernel, row_kernel
from torch import Tensor
from torch.nn import functional


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Rows [..., width] of what is let through, by a kernel where one accepts."""
    kernel = None
    if gate.dtype == up.dtype and not torch.compiler.is_compiling():
        kernel = row_kernel(GateKernel, activation, gate, up)
    return PLAIN[activation](gate) * up if kernel is None else kernel.gated(gate, up, activation)


def _by_tanh(rows: Tensor) -> Tensor:
    return functional.gelu(rows, approximate="tanh")


PLAIN: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _by_tanh,
}
