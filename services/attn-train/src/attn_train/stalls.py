"""Waiting for resources that are temporarily unavailable: disk space, the database, the artefact store."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from attn_core.errors import AttnError, CheckpointWriteFailed, Unavailable
from attn_schema.training import JobState

FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
"""Seconds before the first retry and the maximum; each wait is twice as long as the one before."""
POLL = 0.1
"""Interval in seconds between checks whether to continue waiting."""
AT_WORK = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RECOVERING, JobState.STALLED})
"""States in which a job may stall."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Result = TypeVar("Result")


def waits() -> Iterator[float]:
    """Yield the seconds to wait before each retry."""
    seconds = FIRST_WAIT
    while True:
        yield seconds
        seconds = min(2 * seconds, LONGEST_WAIT)


def is_database_error(error: AttnError) -> bool:
    """Whether the database is unavailable; other `Unavailable` errors mean that another process holds a lease."""
    return isinstance(error, Unavailable) and "database" in error.metadata


def with_retries(
    action: Callable[[], Result],
    on_error: Callable[[AttnError], None],
    *,
    retryable: Callable[[AttnError], bool],
    pause: Callable[[float], bool] | None = None,
) -> Result:
    """Return the result of `action`, retrying it as long as it raises an error for which `retryable` is True.

    `on_error` is called with each error. `pause` waits for the given seconds and returns whether to continue; if not,
    the error is raised. With `pause` None, the action is retried without limit.
    """
    pause = pause or pausing(lambda: True)
    for seconds in waits():
        try:
            return action()
        except AttnError as error:
            if not retryable(error) or not pause(0.0):
                raise
            on_error(error)
            if not pause(seconds):
                raise
    raise RuntimeError("unreachable: the waits never end")


def pausing(wanted: Callable[[], bool]) -> Callable[[float], bool]:
    """Return a function that waits for some seconds while `wanted()` is True, and returns whether it still is."""

    def pause(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while waiting := wanted():
            left = until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, POLL))
        return waiting

    return pause


def is_disk_error(error: AttnError) -> bool:
    """Whether a file could not be written."""
    return isinstance(error, CheckpointWriteFailed)


def is_store_error(error: AttnError) -> bool:
    """Whether the artefact store, or the database, which raises the same error, is unavailable."""
    return isinstance(error, Unavailable)


def is_file_error(error: AttnError) -> bool:
    """Whether a file could not be written, or the artefact store is unavailable."""
    return is_disk_error(error) or is_store_error(error)


def as_disk_error(path: Any, error: OSError) -> OSError | CheckpointWriteFailed:
    """Convert the error of a full disk to `CheckpointWriteFailed`; return any other error as it is."""
    return CheckpointWriteFailed.of(path, error) if error.errno in FULL else error
