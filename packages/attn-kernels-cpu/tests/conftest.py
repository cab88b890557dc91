"""Tests of computation run with every instruction set that this chip has; where it has none the reason is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from attn_core.kernels.linear import LinearProblem
from attn_kernels_cpu import chip, library
from attn_kernels_cpu.compiling import why_not
from attn_kernels_cpu.linears import AmxBfloat16

sys.path.insert(0, str(Path(__file__).parent))
PROBLEM = LinearProblem(weights="bfloat16", inputs=32, outputs=32, dtype="bfloat16")


def forget_library():
    """Let the next one who asks for kernels choose and load them."""
    for known in (library.loaded, library.trouble, library.without_tiles):
        known.cache_clear()


@pytest.fixture
def _fresh_library():
    forget_library()
    yield
    forget_library()


HERE = [found.name for found in chip.supported(chip.flags())]


@pytest.fixture(params=HERE or ["none"])
def isa(request, monkeypatch, _fresh_library):
    """Each instruction set that this chip has, in turn."""
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setenv(chip.VARIABLE, request.param)
    if reason := library.trouble():
        pytest.skip(reason)
    return chip.INSTRUCTION_SETS[request.param]


@pytest.fixture
def _kernels(isa):
    """Skip where kernels cannot be compiled and run; run with every instruction set else."""


@pytest.fixture
def _best_kernels():
    """Skip where kernels cannot be compiled and run."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def _tiles(_best_kernels):
    """Skip where the chip, the system or the compiler has no tile registers."""
    kernel = AmxBfloat16()
    if reason := kernel.available() or "; ".join(kernel.refusals(PROBLEM)):
        pytest.skip(reason)


@pytest.fixture(params=HERE[:-1] or ["none"])
def with_both(request, monkeypatch, _fresh_library):
    """Computes with two instruction sets, the plainest that this chip has and another, and gives both results."""
    if reason := why_not():
        pytest.skip(reason)
    if len(HERE) == 1:
        pytest.skip("this chip has one instruction set only")

    def on(name, compute):
        monkeypatch.setenv(chip.VARIABLE, name)
        forget_library()
        if reason := library.trouble():
            pytest.skip(reason)
        return compute()

    return lambda compute: zip(on(HERE[-1], compute), on(request.param, compute), strict=True)
