"""Process-wide settings for processes that only train; they may harm other workloads."""

from __future__ import annotations

import contextlib
import ctypes
import os

from attn_schema.cores import brief_spins

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
LARGEST_KEPT = 1 << 30


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, instead of returning it to the operating system.

    Each training step frees and allocates the same tensors again. By default glibc returns those of a megabyte or more
    to the system every time, and the page faults of allocating them again take 5 to 10 % of a small model's step. Only
    for processes that only train. Does nothing if the C library has no `mallopt`.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, 2**31 - 1)):
            library.mallopt(option, value)


def spin_briefly() -> None:
    """Make OpenMP threads spin only briefly, see `brief_spins`; to be called before torch is imported."""
    os.environ.update(brief_spins())
