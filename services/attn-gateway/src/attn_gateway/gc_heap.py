"""Excludes the objects that exist at the start of a server from Python's garbage collection.

A full collection traverses every object that may be part of a cycle, and blocks the process meanwhile. A server has
some hundred thousand such objects from its imports alone, which takes 200 ms, in which every stream stalls. A burst of
short requests creates enough new objects for a full collection about every second.
"""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass


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
