"""Compiling launches for a GPU that is not there, and reading what the compiler decided."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import triton
from attn_kernels_triton.launch import Launch
from triton.backends.compiler import GPUTarget

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory of a program on Hopper."""

HOPPER = GPUTarget("cuda", 90, 32)
OTHERS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Absent:
    """A driver of a GPU that is only compiled for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Loop(NamedTuple):
    """What one turn of a loop does: all its instructions, and among them barriers, waits and matrix products."""

    instructions: int
    barriers: int
    waits: int
    products: int


BARRIER = re.compile(r"\b(?:BAR\.|SYNCS\.ARRIVE)")
WAIT = re.compile(r"\b(?:WARPGROUP\.DEPBAR|DEPBAR|LDGDEPBAR|SYNCS\.PHASECHK)")
PRODUCT = re.compile(r"\b(?:(?:HGMMA|QGMMA|IGMMA|HMMA|IMMA|QMMA)\.|UTC\w*MMA\b)")
LABEL = re.compile(r"^(\.L_\w+):", re.MULTILINE)
BRANCH = re.compile(r"\bBRA\b[^;]*`\((\.L_\w+)\)")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/", re.MULTILINE)


class Artefact(NamedTuple):
    """What was compiled: registers of a thread, spilling instructions, bytes of shared memory, and instructions."""

    registers: int
    spills: int
    shared: int
    text: str

    def count(self, instruction: str) -> int:
        """How often an instruction occurs."""
        return len(re.findall(rf"\b{instruction}", self.text))

    def hottest(self) -> Loop:
        """The innermost loop with most matrix products, the longest of several; waits for one barrier are no loops."""
        labels = {found[1]: found.end() for found in LABEL.finditer(self.text)}
        spans = [
            (labels[found[1]], found.end())
            for found in BRANCH.finditer(self.text)
            if labels.get(found[1], found.start()) < found.start()
        ]
        inner = [
            (first, last)
            for first, last in spans
            if not any((first, last) != other and first <= other[0] and other[1] <= last for other in spans)
        ]
        loops = [self._loop(self.text[first:last]) for first, last in inner]
        return max(loops, key=lambda loop: (loop.products, loop.instructions))

    @staticmethod
    def _loop(text: str) -> Loop:
        counts = (len(pattern.findall(text)) for pattern in (INSTRUCTION, BARRIER, WAIT, PRODUCT))
        return Loop(*counts)


def compiled(launch: Launch, target: GPUTarget):
    """The program of a launch, compiled for a target with just the arguments of the launch."""
    driver, before = triton.runtime.driver, triton.runtime.driver._active
    driver.set_active(Absent(target))
    try:
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        # Kernels are kept by device, and all these devices are number 0.
        launch.program.device_caches.clear()
        return launch.program.warmup(launch.call, *launch.tiles, grid=(max(1, launch.programs),), **options)
    finally:
        driver._active = before


def artefact(launch: Launch, target: GPUTarget = HOPPER) -> Artefact:
    """What a chip of NVIDIA would run."""
    kernel = compiled(launch, target)
    usage, text = disassembled(kernel.asm["cubin"])
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    spills = len(re.findall(r"\b(?:LDL|STL)\b", text))
    return Artefact(registers, spills, kernel.metadata.shared, text)


@cache
def disassembled(cubin: bytes) -> tuple[str, str]:
    """What programs of these bytes use, and their instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return output("cuobjdump", "--dump-resource-usage", file.name), output("nvdisasm", "-c", file.name)


def output(tool: str, *arguments: str) -> str:
    """What one of Triton's own tools prints."""
    return subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True).stdout


SLACK = 1.05
"""Instructions that another version of the compiler may add."""


def require_within(found: Loop, budget: Loop) -> None:
    """Fail where a turn needs more than its budget; fewer products would be another tile, of which the rest says
    nothing."""
    assert found.products == budget.products, found
    assert found.instructions <= SLACK * budget.instructions, found
    assert found.barriers <= budget.barriers, found
    assert found.waits <= budget.waits, found
