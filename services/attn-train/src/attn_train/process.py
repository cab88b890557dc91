"""Settings of a process that only trains; they are no business of one that does other things, too."""

from __future__ import annotations

import contextlib
import ctypes
import os

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
LARGEST_KEPT = 1 << 30
SPINS = "10000"


def keep_freed_memory() -> None:
    """From now on, memory that this process frees stays with it instead of going back to the system.

    Each training step frees and takes the same tensors again; by default glibc returns those of a megabyte to
    the system every time, and the page faults of taking them back cost 5 to 10 % of a small model's step. For
    processes that only train. Does nothing where the C library has no `mallopt`.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, 2**31 - 1)):
            library.mallopt(option, value)


def spin_briefly() -> None:
    """Let threads that wait for each other sleep soon, unless GOMP_SPINCOUNT says otherwise.

    To be called before torch is imported. By default GNU's OpenMP spins for about a millisecond at each of a step's
    several hundred meetings. On a machine that does other things, too, the thread waited for cannot run meanwhile:
    two threads were ten times slower than one. This spins for some ten microseconds, longer than neighbours on an
    idle machine take.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
