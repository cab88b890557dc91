"""An engine on a GPU that is pretended, whose kernels of Triton are counted and not computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attn_core.kernels import devices
from attn_testing.pretend_cuda import PretendCuda, pretended_gpu

UNMEASURED = devices.Gpu("pretended", (9, 0))
"""A GPU for which no table of costs was measured."""


@pytest.fixture
def gpu() -> Iterator[PretendCuda]:
    """Counts what a GPU would be asked; kernels are chosen as on a Hopper."""
    with pretended_gpu(UNMEASURED) as counter, torch.inference_mode():
        yield counter
