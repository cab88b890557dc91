"""Memory for weights in huge pages: each step reads all weights once, with a TLB lookup every 4 KB in small pages."""

from __future__ import annotations

import contextlib
import mmap
from threading import Lock

import torch
from torch import Tensor

LINE = 64
"""The size of a cache line in bytes."""
LARGE = 2 << 20
"""The size of a huge page in bytes."""
PIECE = 32 << 20
"""The number of bytes that are mapped at once; pages that are never written take no memory."""


class LargePages:
    """An allocator over pieces of memory for which huge pages are requested, if the system has them.

    A piece is freed once nothing refers to any part of it. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def room(self, size: int) -> Tensor:
        """Allocate zeros [size], uint8, aligned to a cache line."""
        taken = -(-size // LINE) * LINE
        if taken > PIECE:
            return _piece(taken)[:size]
        with self._lock:
            if taken > len(self._left):
                self._left = _piece(PIECE)
            memory, self._left = self._left[:size], self._left[taken:]
        return memory


def _piece(size: int) -> Tensor:
    """Map at least `size` zero bytes, aligned to a huge page."""
    memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A Linux kernel may be built without huge pages.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % LARGE :]
