"""What operators of compiled graphs compute by another kernel, where this chip cannot run their programs."""

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
"""What torch leaves out of the dispatch inside of an operator."""


@contextmanager
def recording(device: torch.device) -> Iterator[None]:
    """Within it, inside of an operator, gradients are recorded as outside of one, and nothing is cast."""
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
    """What `compute` gives, copied into these tensors: an operator gives nothing that it was given."""
    with torch.no_grad(), torch.autocast(like[0].device.type, enabled=False):
        return [into.copy_(found) for into, found in zip(like, compute(), strict=False)]


def gradients_of(
    compute: Callable[[list[Tensor]], Sequence[Tensor]], leaves: Sequence[Tensor], changes: Sequence[Tensor | None]
) -> list[Tensor]:
    """Gradients to these leaves, of their shapes, types and strides, of those to what `compute` makes of them.

    None is no gradient. `compute` runs again, for nothing of its first run was kept.
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
