"""Python's garbage collector in a process that serves: what was there at the start is not looked at again.

A full collection looks at every object that may be part of a cycle, and everything else in the process waits for it. A
server has some hundred thousand from its imports alone, which takes 200 ms: every stream stands still meanwhile. A
burst of short requests makes enough new objects for a full collection every second or so.
"""

from __future__ import annotations

import atexit
import gc
from dataclasses import dataclass


@dataclass(frozen=True)
class GcHeap:
    """Objects that the collector knows of: `frozen` ones, which it leaves alone, and those that it looks at."""

    frozen: int
    collected: int

    @classmethod
    def now(cls) -> GcHeap:
        """That of this process."""
        return cls(gc.get_freeze_count(), len(gc.get_objects()))


def freeze_gc_heap() -> GcHeap:
    """Collect once, then leave what is there out of all later collections; for a process that is ready to serve.

    Frozen objects are freed as soon as nothing refers to them, as all others: only cycles among them are not found
    before the process ends.
    """
    gc.collect()
    gc.freeze()
    # Else libraries that count their objects at the end would report all in cycles as leaked.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
    return GcHeap.now()
