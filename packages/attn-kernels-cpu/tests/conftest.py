"""Tests of computation need a chip that can run the kernels; the reason is told where there is none."""

from __future__ import annotations

import pytest
from attn_kernels_cpu.compiling import why_not


@pytest.fixture
def _kernels():
    """Skip where kernels cannot be compiled and run."""
    if reason := why_not():
        pytest.skip(reason)
