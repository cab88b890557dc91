"""Devices by name: which are available, why one is not, the dtypes it computes in and how much of its memory is free.

A device or dtype that cannot be used raises an error with the reason; there is no fallback to another device. Only
`auto` chooses a device, and logs a warning if it does not use a GPU that is there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from attn_core.errors import InvalidValue, OutOfCapacity
from attn_schema.device import AUTO, DEVICE, require_device

log = logging.getLogger(__name__)

BFLOAT16_SINCE = (8, 0)
"""Compute capability of the first NVIDIA GPUs with bfloat16 instructions (Ampere)."""


def resolve_device(name: str) -> torch.device:
    """The device called `name`: `auto`, `cpu`, `cuda` (the first visible one), `cuda:INDEX` or `mps`.

    `auto` is the first CUDA device or else MPS, if it can be used, else the CPU. Raises `InvalidValue`, with the
    reason, for a device that this machine does not have or that its driver or this torch cannot use.
    """
    require_device("device", name)
    if name == "cpu":
        return torch.device("cpu")
    if name == AUTO:
        return _best()
    why = cuda_problem() if name.startswith("cuda") else mps_problem()
    if why is not None:
        raise InvalidValue.of("device", name, f"cpu or auto, as {why}")
    if name == "mps":
        return torch.device("mps")
    found = DEVICE.fullmatch(name)
    index, count = int((found and found["index"]) or 0), torch.cuda.device_count()
    if index >= count:
        devices = ", ".join(f"cuda:{place}" for place in range(count))
        raise InvalidValue.of("device", name, f"cpu, {devices}{_visible_devices_note()}")
    device = torch.device("cuda", index)
    why = chip_problem(device)
    if why is not None:
        raise InvalidValue.of("device", name, f"a GPU that this torch was built for, as {why}")
    return device


def _best() -> torch.device:
    if cuda_problem() is None:
        why = chip_problem(torch.device("cuda", 0))
        if why is None:
            return torch.device("cuda", 0)
        log.warning("device auto is the CPU: %s", why)
    elif torch.version.cuda is not None and Path("/proc/driver/nvidia").exists():
        log.warning("device auto is the CPU: %s", cuda_problem())
    return torch.device("cpu" if mps_problem() else "mps")


def cuda_problem() -> str | None:
    """The reason why this process cannot use CUDA (torch without CUDA, no driver or an old one), or None if it can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this torch ({torch.__version__}) is built without CUDA; install one that is built with it"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        # For an old driver, torch's message names its version and the one that is needed.
        return f"CUDA cannot be used: {str(error).splitlines()[0]}{_visible_devices_note()}"
    return f"no CUDA device is visible{_visible_devices_note()}"


def _visible_devices_note() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"


def chip_problem(device: torch.device) -> str | None:
    """The reason why this torch cannot run on a CUDA device (no code for its architecture), or None if it can."""
    if torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    known = torch.cuda.get_arch_list()
    if not known or _runs_on(known, major, minor):
        return None
    name = torch.cuda.get_device_name(device)
    return f"{name} is sm_{major}{minor} and torch {torch.__version__} was built for {', '.join(known)}"


def _runs_on(architectures: Iterable[str], major: int, minor: int) -> bool:
    """Whether code for one of these `architectures` (sm_90, sm_90a, compute_90) runs on a GPU of this compute
    capability: machine code (sm) needs the same major version and no later minor one, PTX (compute) no later
    version."""
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        if not digits.isdecimal():
            continue
        built = divmod(int(digits), 10)
        same = built[0] == major and built[1] <= minor
        if (kind == "sm" and same) or (kind == "compute" and built <= (major, minor)):
            return True
    return False


def mps_problem() -> str | None:
    """The reason why this process cannot use Apple's GPU, or None if it can."""
    if not torch.backends.mps.is_built():
        return f"this torch ({torch.__version__}) is built without MPS"
    return None if torch.backends.mps.is_available() else "this machine has no GPU that MPS can use (macOS 14 or later)"


def resolve_dtype(name: str, device: torch.device) -> str:
    """The dtype called `name` on this device; `auto` is bfloat16 on a CUDA device that supports it, else float32.

    Raises `InvalidValue` for a dtype that the device does not compute in. Unknown names are returned unchanged.
    """
    computes_bfloat16 = device.type != "cuda" or bfloat16_problem(device) is None
    if name == AUTO:
        return "bfloat16" if device.type == "cuda" and computes_bfloat16 else "float32"
    if name == "bfloat16" and not computes_bfloat16:
        raise InvalidValue.of("dtype", name, f"float32 or float16, as {bfloat16_problem(device)}")
    if name == "float64" and device.type == "mps":
        raise InvalidValue.of("dtype", name, "float32, bfloat16 or float16: MPS has no float64")
    return name


def bfloat16_problem(device: torch.device) -> str | None:
    """The reason why a CUDA device cannot compute in bfloat16, or None if it can."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) >= BFLOAT16_SINCE:
        return None
    return f"{torch.cuda.get_device_name(device)} has no instructions for bfloat16 and torch would imitate them"


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """The bytes of a GPU's memory that this process can still allocate, and its total; None for the CPU.

    Memory that torch has reserved but not allocated counts as free.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.current_allocated_memory(), total
    return None


def total_memory(device: torch.device) -> int | None:
    """The total bytes of a GPU's memory; None for the CPU. Allocates none of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(torch.mps.recommended_max_memory()) if device.type == "mps" else None


def require_memory(device: torch.device, needed: int, what: str, remedy: str) -> None:
    """Raise `OutOfCapacity` unless `needed` bytes are free on the device; the message contains `what` and `remedy`."""
    memory = device_memory(device)
    if memory is not None and needed > memory[0]:
        raise OutOfCapacity(
            f"{what} needs {in_words(needed)} of memory on {device}, where {in_words(memory[0])} of "
            f"{in_words(memory[1])} are free. {remedy}",
            device=device,
            needed_bytes=needed,
            free_bytes=memory[0],
        )


def in_words(size: int) -> str:
    """A number of bytes in a readable form, such as "1.5 GiB"."""
    gibibytes = size / 2**30
    return f"{gibibytes:.1f} GiB" if gibibytes >= 1 else f"{size / 2**20:.0f} MiB"
