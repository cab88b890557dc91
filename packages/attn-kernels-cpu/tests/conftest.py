"""Tests of computation need a chip that can run the kernels; the reason is told where there is none."""

from __future__ import annotations

import pytest
from attn_core.kernels.linear import LinearProblem
from attn_kernels_cpu.compiling import why_not
from attn_kernels_cpu.linears import AmxBfloat16

PROBLEM = LinearProblem(weights="bfloat16", inputs=32, outputs=32, dtype="bfloat16")


@pytest.fixture
def _kernels():
    """Skip where kernels cannot be compiled and run."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def _tiles(_kernels):
    """Skip where the chip, the system or the compiler has no tile registers."""
    kernel = AmxBfloat16()
    if reason := kernel.available() or "; ".join(kernel.refusals(PROBLEM)):
        pytest.skip(reason)
