"""Whether constant tensors on a device may be cached across calls."""

from __future__ import annotations

import torch


def in_trace() -> bool:
    """Whether tensors created now must not be cached for later calls.

    True while `torch.compile` traces, and in a `FakeTensorMode`, whose tensors hold no data.
    """
    if torch.compiler.is_compiling():
        return True
    fake = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001
    return torch._C._get_dispatch_mode(fake) is not None  # noqa: SLF001
