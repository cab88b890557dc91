"""An engine on a GPU that is pretended, whose kernels of Triton are counted and not computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attn_core.kernels import devices
from pretend_cuda import PretendCuda, pretended_gpu

UNMEASURED = devices.Gpu("pretended", (9, 0))
"""A GPU for which no table of costs was measured."""


def require_triton() -> None:
    """Skip a test that counts Triton's programs where Triton is not installed."""
    pytest.importorskip("triton", reason="what a GPU would run are programs of Triton")


@pytest.fixture
def gpu() -> Iterator[PretendCuda]:
    """Counts what a GPU would be asked; kernels are chosen as on a Hopper, which are Triton's."""
    require_triton()
    with pretended_gpu(UNMEASURED) as counter, torch.inference_mode():
        yield counter
