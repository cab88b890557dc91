"""Locks that the operating system frees when their holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attn_core.errors import Unavailable

POLL_SECONDS = 0.05


@contextmanager
def exclusive(path: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path` alone among all processes of this machine, waiting for `wait` seconds at most.

    Raises Unavailable if somebody else still holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _acquire(descriptor, path, time.monotonic() + wait)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Unavailable(f"{path} is held by another process of this machine", path=path) from None
            time.sleep(POLL_SECONDS)
        else:
            return
