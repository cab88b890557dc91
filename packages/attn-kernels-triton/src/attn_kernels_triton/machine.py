"""Whether Triton kernels can run on this machine, found out without importing torch or triton."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec

DRIVERS = (("libcuda.so.1", "cuInit", "cuDeviceGetCount"), ("libamdhip64.so", "hipInit", "hipGetDeviceCount"))
"""Libraries that drive GPUs, with their functions that start them and count devices."""


@cache
def absence() -> str | None:
    """Why no Triton kernel can run here, or None if one can."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton (Linux on x86-64)"
    if interpreted():
        return None
    if not any(devices(*driver) for driver in DRIVERS):
        return "this machine has no GPU, or no driver for it"
    return None


def devices(library: str, start: str, count: str) -> int:
    """GPUs that a driver sees; 0 where it is not installed or does not work."""
    try:
        driver = ctypes.CDLL(library)
        if getattr(driver, start)(0) != 0:
            return 0
        found = ctypes.c_int(0)
        failed = getattr(driver, count)(ctypes.byref(found))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else found.value


def interpreted() -> bool:
    """Whether Triton interprets programs on the CPU, as tests ask it to (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}
