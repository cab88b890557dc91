"""Standstills of a server's process: garbage collection makes fewer, and none is taken for the silence of others.

A full collection traverses every object that may be part of a cycle, and blocks the process meanwhile. A server has
some hundred thousand such objects from its imports alone, which takes 200 ms, in which every stream stalls. A burst of
short requests creates enough new objects for a full collection about every second.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
from collections.abc import Awaitable
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

SLICE_SECONDS = 0.25
"""The most that one standstill of this process counts for `answer`."""
T = TypeVar("T")


@dataclass(frozen=True)
class GcHeap:
    """The numbers of objects that the garbage collector ignores (`frozen`) and traverses (`collected`)."""

    frozen: int
    collected: int

    @classmethod
    def now(cls) -> GcHeap:
        """The numbers of this process now."""
        return cls(gc.get_freeze_count(), len(gc.get_objects()))


def freeze_gc_heap() -> GcHeap:
    """Collect once, then exclude all present objects from later collections; for a process that is ready to serve.

    Frozen objects are still freed as soon as nothing refers to them; only cycles among them are not found before the
    process ends.
    """
    gc.collect()
    gc.freeze()
    # Otherwise libraries that count their objects at exit would report those in cycles as leaked.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
    return GcHeap.now()


async def answer(awaitable: Awaitable[T], seconds: float) -> T:
    """Wait for a result; raises `TimeoutError`, and cancels what is awaited, after `seconds` of this event loop.

    A process may be stopped or get no processor for longer than that: `asyncio.timeout` gives up then even if the
    result has come. Here a standstill counts `SLICE_SECONDS`, however long it was.
    """
    future = asyncio.ensure_future(awaitable)
    slices = ceil(seconds / SLICE_SECONDS)
    try:
        for _ in range(slices):
            done, _ = await asyncio.wait({future}, timeout=seconds / slices)
            if done:
                return future.result()
        raise TimeoutError
    finally:
        future.cancel()
