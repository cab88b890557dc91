"""Fallbacks for operators of compiled graphs: values and gradients by another kernel, if this GPU cannot run theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

AUTOGRAD = (
    torch._C.DispatchKey.AutogradFunctionality,  # noqa: SLF001
    torch._C.DispatchKey.AutogradOther,  # noqa: SLF001
    torch._C.DispatchKey.AutogradNestedTensor,  # noqa: SLF001
    torch._C.DispatchKey.ADInplaceOrView,  # noqa: SLF001
)
"""The dispatch keys that PyTorch excludes inside a custom operator."""


@contextmanager
def recording(device: torch.device) -> Iterator[None]:
    """Record gradients inside a custom operator as outside of one, with autocast disabled."""
    inside, left_out = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()  # noqa: SLF001
    for key in AUTOGRAD:
        left_out = left_out.remove(key)
    with (
        torch._C._ForceDispatchKeyGuard(inside, left_out),  # noqa: SLF001
        torch.autocast(device.type, enabled=False),
        torch.enable_grad(),
    ):
        yield


def values_of(compute: Callable[[], Sequence[Tensor]], like: Sequence[Tensor]) -> list[Tensor]:
    """The results of `compute`, copied into the tensors `like`: a custom operator must not return its own inputs."""
    with torch.no_grad(), torch.autocast(like[0].device.type, enabled=False):
        return [into.copy_(found) for into, found in zip(like, compute(), strict=False)]


def gradients_of(
    compute: Callable[[list[Tensor]], Sequence[Tensor]], leaves: Sequence[Tensor], changes: Sequence[Tensor | None]
) -> list[Tensor]:
    """Gradients with respect to `leaves`, with their shapes, dtypes and strides.

    `changes` are the gradients with respect to the results of `compute`; None is no gradient. The forward pass is
    recomputed, because nothing of its first run was saved.
    """
    with recording(leaves[0].device):
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        pairs = zip(compute(own), changes, strict=False)
        used = [(out, change.to(out.dtype)) for out, change in pairs if change is not None and out.requires_grad]
        outs, given = [out for out, _ in used], [change for _, change in used]
        found = torch.autograd.grad(outs, own, given, allow_unused=True) if used else [None] * len(own)
    return [
        torch.zeros_like(leaf) if part is None else torch.empty_like(leaf).copy_(part)
        for leaf, part in zip(leaves, found, strict=True)
    ]
