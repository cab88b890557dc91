"""The numerics of every program, on the CPU: a process that interprets them cannot compile, so it is another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).with_name("interpreted")


NIGHTLY = {"test_engine_step.py"}
"""What takes more than a minute."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=[pytest.mark.nightly] * (path.name in NIGHTLY))
        for path in sorted(FOLDER.glob("test_*.py"))
    ],
)
def test_interpreted_programs_compute_what_is_defined(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(FOLDER / name),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


UNREPAIRED = """
import torch
from attn_core import installed
from attn_variants import attend
asked = 0
for kernel in installed().kernels:
    if type(kernel).__module__.startswith("attn_kernels_triton") and "dtype" in kernel.accepts:
        asked += 1
        assert kernel.accepts["dtype"].refuses("bfloat16"), kernel.name
assert asked >= 8, asked
torch.manual_seed(0)
rows = [torch.randn(1, 2, 20, 32).bfloat16() for _ in range(3)]
exact = attend(*(part.double() for part in rows), kernel="plain")
assert (attend(*rows).double() - exact).abs().max() < 0.02
"""


def test_the_interpreter_is_not_given_types_that_it_computes_wrongly() -> None:
    """In a process that sets the variable and repairs nothing, as one who debugs a kernel of their own does."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", UNREPAIRED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
