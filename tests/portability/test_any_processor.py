"""What is promised bit for bit holds on processors with narrower vector instructions than this one's.

Bits are owed where nothing is added up (rows are moved, masks drawn, weights read from a file, state restored), where
one program runs twice on the same tensors (a seed, a resumed run), and where a kernel of ours fixes the order of its
additions (batch invariance of attn-kernels-cpu). They are not owed between two products of matrices, however alike:
libraries choose the order of additions by shape, alignment and processor, so results are compared to rounding there.
Tests of the first kind say `torch.equal`, and all of those run here again with the instructions of lesser processors.
The variables bound PyTorch's own loops, oneDNN and, on Intel's processors, MKL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("packages", "plugins", "services", "tests")
PROCESSORS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "sse": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}


def files_that_compare_bits() -> list[str]:
    """Test files with `torch.equal`; interpreted kernels compute with numpy, which none of the variables reaches."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("test_*.py"))]
    return [
        str(path) for path in files if path.parent.name != "interpreted" and "torch.equal(" in path.read_text("utf-8")
    ]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_bits_are_the_same_with_the_instructions_of(processor: str) -> None:
    options = [
        "-q",
        "--tb=short",
        "-rf",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not oracle and not cluster and not nightly and not slow",
        "--bitwise",
    ]
    command = [sys.executable, "-m", "pytest", *options, *files_that_compare_bits()]
    environment = {**os.environ, **PROCESSORS[processor], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=880)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_variables_reach_pytorch() -> None:
    said = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {**os.environ, **PROCESSORS["sse"]}
    done = subprocess.run(
        [sys.executable, "-c", said], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "DEFAULT"
