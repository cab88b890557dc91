"""Queries about this machine's GPU, made to its driver without a tensor library."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

DRIVERS = (("libcuda.so.1", "cuInit", "cuDeviceGetCount"), ("libamdhip64.so", "hipInit", "hipGetDeviceCount"))
"""GPU driver libraries, each with the names of its functions to initialise it and to count devices."""

NO_GPU = "this machine has no GPU, or no driver for it"
"""Why a GPU kernel is not available on a machine without a GPU."""

MAJOR, MINOR = 75, 76
"""Numbers of the driver's attributes for the two parts of the compute capability."""


class Gpu(NamedTuple):
    """A class of devices: its name as the driver gives it, and its compute capability, (9, 0) for an H200."""

    name: str
    capability: tuple[int, int]


def sent(here: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device; for a GPU asynchronously, from pinned memory, so that the host does not wait."""
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


@cache
def has_gpu() -> bool:
    """Whether any driver finds a GPU."""
    return any(devices(*driver) for driver in DRIVERS)


def devices(library: str, start: str, count: str) -> int:
    """The number of GPUs that a driver finds; 0 if it is not installed or does not work."""
    try:
        driver = ctypes.CDLL(library)
        if getattr(driver, start)(0) != 0:
            return 0
        found = ctypes.c_int(0)
        failed = getattr(driver, count)(ctypes.byref(found))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else found.value


@cache
def nvidia_gpu() -> Gpu | None:
    """The first NVIDIA GPU that is visible to this process; None without one."""
    library, start, count = DRIVERS[0]
    if not devices(library, start, count):
        return None
    driver = ctypes.CDLL(library)
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(128)
    parts = ctypes.c_int(0), ctypes.c_int(0)
    failed = driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(name, len(name), device)
    for part, attribute in zip(parts, (MAJOR, MINOR), strict=True):
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    return None if failed else Gpu(name.value.decode(), (parts[0].value, parts[1].value))
