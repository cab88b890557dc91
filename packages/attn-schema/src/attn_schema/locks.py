"""File locks between processes of one machine; the operating system releases them when the holding process ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attn_core.errors import Unavailable
from filelock import FileLock, Timeout

POLL_SECONDS = 0.05


@contextmanager
def exclusive(path: Path, wait: float | None = 0.0) -> Iterator[None]:
    """Hold the lock file `path`, after waiting for at most `wait` seconds; None waits indefinitely.

    Two threads of one process exclude each other as two processes do. Raises `Unavailable` if the lock is still held
    after that time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=-1 if wait is None else wait, poll_interval=POLL_SECONDS)
    except Timeout:
        raise Unavailable(f"{path} is held by another process of this machine", path=path) from None
    try:
        yield
    finally:
        lock.release()
