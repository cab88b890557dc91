"""Waiting for a private Ray that starts slowly: as long as its processes get on, not the half minute of Ray itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import structlog
from attn_core.errors import Unavailable

log = structlog.get_logger()

STALL_SECONDS = 60.0
"""How long no process of Ray may use processor time before its start is given up."""
TOLD_SECONDS = 10.0
"""Interval at which the log says what is waited for."""
POLL_SECONDS = 0.2
WHAT = "Ray's scheduler (raylet) to register with its control store"


class Progress:
    """The processor time that the processes below this one use; `since` is when it last grew."""

    def __init__(self, before: set[psutil.Process]) -> None:
        self._before = before
        self._most = -1.0
        self.began = self.since = time.monotonic()

    def look(self) -> None:
        """Look at the processes; raises `Unavailable` once a child has ended, or when nothing has happened for long."""
        now, used = time.monotonic(), 0.0
        for child in set(psutil.Process().children()) - self._before:
            try:
                if child.status() == psutil.STATUS_ZOMBIE:
                    raise Unavailable(f"waited {now - self.began:.0f} s for {WHAT}, but a process of Ray ended")
                used += sum(sum(process.cpu_times()[:2]) for process in (child, *child.children(recursive=True)))
            except psutil.NoSuchProcess:
                continue
        if used > self._most:
            self._most, self.since = used, now
        if now - self.since > STALL_SECONDS:
            stalled = f"its processes have used no processor time for {now - self.since:.0f} s"
            raise Unavailable(f"waited {now - self.began:.0f} s for {WHAT}; {stalled}")

    @property
    def seconds(self) -> float:
        """How long Ray has been starting."""
        return time.monotonic() - self.began


@contextmanager
def patience() -> Iterator[None]:
    """Make `ray.init` within the block wait as long as the processes that it starts get on.

    Ray itself asks its control store for the node for 30 seconds, a constant in its source. So the question waits.
    """
    from ray._private import services

    find: Callable[..., Any] = services.get_node
    progress = Progress(set(psutil.Process().children()))

    def found(*arguments: Any) -> Any:
        told = progress.seconds + TOLD_SECONDS
        while True:
            try:
                return find(*arguments)
            except RuntimeError:
                progress.look()
            if progress.seconds > told:
                told = progress.seconds + TOLD_SECONDS
                log.warning("waiting for Ray", what=WHAT, seconds=round(progress.seconds))
            time.sleep(POLL_SECONDS)

    services.get_node = found
    try:
        yield
    finally:
        services.get_node = find
