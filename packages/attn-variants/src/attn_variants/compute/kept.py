"""Which tables of numbers, brought to a device once, may be kept from call to call."""

from __future__ import annotations

import torch


def in_trace() -> bool:
    """Whether tensors made now are of this call alone, so that no later one may be given them.

    `torch.compile` traces it, or a `FakeTensorMode` makes tensors without numbers.
    """
    if torch.compiler.is_compiling():
        return True
    fake = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001
    return torch._C._get_dispatch_mode(fake) is not None  # noqa: SLF001
