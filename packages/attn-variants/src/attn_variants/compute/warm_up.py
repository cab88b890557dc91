"""Trial backward passes, so that a kernel whose backward fails on this device is replaced before the forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from attn_core import AttentionInputs
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from attn_variants.compute.constants import in_trace

_warm: set[tuple[Hashable, ...]] = set()


def warm_up_backward(
    kind: tuple[Hashable, ...], compute: Callable[[AttentionInputs], Tensor], operands: AttentionInputs
) -> None:
    """Run a backward pass with zero gradients once for each kind of call that needs gradients, on detached inputs.

    Call it before the call itself: if the device or build lacks the backward kernel, the error is raised here, before
    anything is saved, and `attn_core.kernels.dispatch.Operation.run` tries the next kernel. `kind` names the kernel
    and everything that its backward kernel depends on. Skipped for tensor subclasses, while tracing, and in dispatch
    modes such as FLOP counters.
    """
    kind = (*kind, operands.query.device)
    if kind in _warm or not torch.is_grad_enabled() or in_trace():
        return
    if type(operands.query) not in {Tensor, torch.nn.Parameter} or _get_current_dispatch_mode() is not None:
        return
    rows: dict[str, Any] = {name: apart(getattr(operands, name)) for name in ("query", "key", "value")}
    weights = {name: apart(weight) for name, weight in operands.parameters.items()}
    learned = [part for part in (*rows.values(), *weights.values()) if part.requires_grad]
    if not learned:
        return
    # Hide the caller's saved-tensor hooks: those of checkpointing would take this for a part of the layer.
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        out = compute(dataclasses.replace(operands, parameters=weights, **rows))
        if out.requires_grad:
            torch.autograd.grad(out, learned, torch.zeros_like(out), allow_unused=True)
    _warm.add(kind)


def apart(part: Tensor) -> Tensor:
    """The tensor detached from its graph, requiring a gradient if it did before."""
    return part.detach().requires_grad_(part.requires_grad)


def _same(saved: Any) -> Any:
    return saved
