"""Memory for weights in large pages: a step reads all of them once, and would look up a small page every 4 KB."""

from __future__ import annotations

import contextlib
import mmap
from threading import Lock

import torch
from torch import Tensor

LINE = 64
"""Bytes of a cache line."""
LARGE = 2 << 20
"""Bytes of a large page."""
PIECE = 32 << 20
"""Bytes that are asked of the system at once; what is never written takes no memory."""


class LargePages:
    """Hands out memory from pieces that the system is asked to keep in large pages, where it has such.

    A piece is given back once nothing refers to any part of it. Threads may ask for room at the same time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def room(self, size: int) -> Tensor:
        """Zeros [size], uint8, that begin where a cache line does."""
        taken = -(-size // LINE) * LINE
        if taken > PIECE:
            return _piece(taken)[:size]
        with self._lock:
            if taken > len(self._left):
                self._left = _piece(PIECE)
            memory, self._left = self._left[:size], self._left[taken:]
        return memory


def _piece(size: int) -> Tensor:
    """At least `size` zeros that begin where a large page does."""
    memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel may be built without them.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % LARGE :]
