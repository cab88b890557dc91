"""Running a backward pass before it is needed, so that a kernel whose gradients a chip lacks gives way in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from attn_core import AttentionInputs
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from attn_variants.compute.kept import in_trace

_warm: set[tuple[Hashable, ...]] = set()


def warm_up_backward(
    kind: tuple[Hashable, ...], compute: Callable[[AttentionInputs], Tensor], operands: AttentionInputs
) -> None:
    """Compute gradients of zeros the first time that a call of this kind needs some, apart from the caller's graph.

    To be called before the call itself: what a device or its build lacks raises here, where the next kernel can take
    its place, see `attn_core.kernels.dispatch.KernelTable.run`, and before anything is saved. `kind` is the kernel and
    all by which its backward passes differ. Left out are tensors that only stand for others, and calls that are traced
    or counted.
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
    # Of the caller's hooks on what is saved, those of checkpointing would take this for a part of the layer.
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        out = compute(dataclasses.replace(operands, parameters=weights, **rows))
        if out.requires_grad:
            torch.autograd.grad(out, learned, torch.zeros_like(out), allow_unused=True)
    _warm.add(kind)


def apart(part: Tensor) -> Tensor:
    """The same numbers, that need a gradient if these do, and hold nothing of how they came about."""
    return part.detach().requires_grad_(part.requires_grad)


def _same(saved: Any) -> Any:
    return saved
