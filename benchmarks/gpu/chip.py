"""Facts about the GPU, and its copy and matrix product rates: the upper limits for all other results of the run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import torch
import triton
from timing import copied_per_second, seconds

CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
FACTS = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit", *CLOCKS)


def lacking(device: str) -> str | None:
    """The reason why nothing can be measured on a device, or None if it is usable."""
    if device != "cuda":
        return None
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA; DEVICE=cpu rehearses with --small"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return f"CUDA cannot be used: {str(error).splitlines()[0]}"
    return None


def facts(device: str) -> dict[str, Any]:
    """The device, versions and driver facts; for a device that cannot be used, the reason under `lacks`."""
    found = {"torch": torch.__version__, "triton": triton.__version__, "device": device}
    if device != "cuda":
        return found
    if (why := lacking(device)) is not None:
        return {**found, "lacks": why}
    properties = torch.cuda.get_device_properties(0)
    numbers = {"bytes": properties.total_memory, "multiprocessors": properties.multi_processor_count}
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return {**found, "device": properties.name, **numbers, **versions, "driver": asked(FACTS)}


def short(device: str) -> str:
    """The name of a card in names of files: "NVIDIA H100 80GB HBM3" is h100."""
    words = device.lower().removeprefix("nvidia ").split()
    return words[0] if words else "gpu"


def asked(fields: tuple[str, ...] = CLOCKS) -> dict[str, str]:
    """The values of these nvidia-smi fields; empty if nvidia-smi is missing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except subprocess.TimeoutExpired:
        return {"driver": "nvidia-smi did not answer within 20 s"}
    return dict(zip(fields, said.split(", "), strict=False))


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The bytes per second read and written by copying, and the rate of a bfloat16 matrix product."""
    yield {"case": "copy", "bytes_per_second": copied_per_second(device)}
    side = 64 if small else 8192
    one, other = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    yield {"case": f"product, {side}", "tflops": 2 * side**3 / seconds(lambda: one @ other, device) / 1e12}
