"""Whether Triton kernels can run on this machine, found out without importing torch or triton."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from attn_core.kernels import devices


def absence() -> str | None:
    """Why no Triton kernel can run here, or None if one can."""
    if not has_triton():
        return "triton is not installed: pip install triton (Linux on x86-64)"
    if interpreted():
        return None
    return None if devices.has_gpu() else devices.NO_GPU


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton interprets programs on the CPU, as tests ask it to (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}
