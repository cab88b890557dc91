"""Whether Triton kernels can run on this machine, determined without importing torch or triton."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from attn_core.kernels import devices


def absence() -> str | None:
    """Why no Triton kernel can run here, or None if one can."""
    if not has_triton():
        return "triton is not installed; GPU builds of torch include it, or: pip install triton (Linux on x86-64)"
    if interpreted():
        return None
    return None if devices.has_gpu() else devices.NO_GPU


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU (`TRITON_INTERPRET=1`), as in tests."""
    return os.environ.get("TRITON_INTERPRET", "0") not in {"", "0"}


CANNOT = ("passmanager::run failed", "no kernel image", "device kernel image is invalid", "invalid device function")
"""Parts of the error messages, in lower case, of Triton or the driver for a kernel that a GPU cannot run."""


def uncompilable(error: Exception) -> str | None:
    """Why this GPU cannot run a kernel, if that is what an error of its launch means; None for other errors.

    Triton raises its own exception types if it cannot compile a kernel or the GPU lacks the resources for one.
    """
    message, kind = str(error), type(error)
    own = kind.__module__.partition(".")[0] == "triton" and kind.__name__ != "InterpreterError"
    if own or (kind is RuntimeError and any(words in message.lower() for words in CANNOT)):
        return f"{kind.__name__}: {message.strip().splitlines()[-1] if message.strip() else 'no message'}"
    return None
