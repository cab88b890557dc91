"""Compiling launches for a GPU that is not there, and reading what the compiler decided."""

from __future__ import annotations

import re
import subprocess
import tempfile
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


class Artefact(NamedTuple):
    """What was compiled: registers of a thread, spilling instructions, bytes of shared memory, and instructions."""

    registers: int
    spills: int
    shared: int
    text: str

    def count(self, instruction: str) -> int:
        """How often an instruction occurs."""
        return len(re.findall(rf"\b{instruction}", self.text))


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


def artefact(launch: Launch) -> Artefact:
    """What Hopper would run."""
    kernel = compiled(launch, HOPPER)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = output("cuobjdump", "--dump-resource-usage", file.name)
        text = output("nvdisasm", "-c", file.name)
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    spills = len(re.findall(r"\b(?:LDL|STL)\b", text))
    return Artefact(registers, spills, kernel.metadata.shared, text)


def output(tool: str, *arguments: str) -> str:
    """What one of Triton's own tools prints."""
    return subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True).stdout
