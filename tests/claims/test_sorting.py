"""CL-54: hashing sorts each token once a head and round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_core import Capability, configure, installed
from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """The elements that are sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.sorted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "sort" in func.name():
            self.sorted += args[0].numel()
        return out


def seen(name: str, length: int, options: dict[str, int]) -> Seen:
    """What one forward over `length` tokens makes."""
    torch.manual_seed(0)
    mechanism = installed().mechanisms.get(name)
    layer = mechanism.build(
        configure(mechanism, options, hidden_size=8, num_heads=2, causal=mechanism.can(Capability.CAUSAL))
    )
    with torch.no_grad(), Seen() as found:
        layer.eval()(torch.randn(1, length, 8))
    return found


@pytest.mark.parametrize("length", [128, 512])
def test_cl_54_hashing_sorts_every_token_once_a_head_and_round(length: int) -> None:
    """So it takes n log n comparisons, beside products that grow with n."""
    assert seen("lsh", length, {"buckets": 8, "chunk": 16, "rounds": 3}).sorted == 3 * 2 * length
