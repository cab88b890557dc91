"""Waiting out what a job needs and cannot have for a while: room on the disk, the database, the artefact store."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from attn_core.errors import AttnError, CheckpointWriteFailed, Unavailable
from attn_schema.training import JobState

FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
"""Seconds before the first new try, each twice as long as the one before, and the longest."""
POLL = 0.1
"""Seconds between looks at whether waiting is still wanted."""
AT_WORK = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RECOVERING, JobState.STALLED})
"""States in which something may stall."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Result = TypeVar("Result")


def waits() -> Iterator[float]:
    """Seconds to wait before each new try."""
    seconds = FIRST_WAIT
    while True:
        yield seconds
        seconds = min(2 * seconds, LONGEST_WAIT)


def is_of_database(error: AttnError) -> bool:
    """Whether the database cannot be used; another `Unavailable` says that somebody else holds a lease."""
    return isinstance(error, Unavailable) and "database" in error.metadata


def persistently(
    action: Callable[[], Result],
    stalled: Callable[[AttnError], None],
    *,
    of: Callable[[AttnError], bool],
    pause: Callable[[float], bool] | None = None,
) -> Result:
    """The result of `action`, which is tried again for as long as it raises an error `of` which waiting helps.

    `stalled` is told of each error; `pause` waits for so many seconds and says whether to go on, and if not, the error
    is raised. None: it goes on for as long as it takes.
    """
    pause = pause or pausing(lambda: True)
    for seconds in waits():
        try:
            return action()
        except AttnError as error:
            if not of(error) or not pause(0.0):
                raise
            stalled(error)
            if not pause(seconds):
                raise
    raise RuntimeError("there is always another wait")


def pausing(wanted: Callable[[], bool]) -> Callable[[float], bool]:
    """What waits for so many seconds for as long as that is `wanted`, which is asked often, and says whether it is."""

    def pause(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while going := wanted():
            left = until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, POLL))
        return going

    return pause


def is_of_disk(error: AttnError) -> bool:
    """Whether something could not be written."""
    return isinstance(error, CheckpointWriteFailed)


def is_of_store(error: AttnError) -> bool:
    """Whether the artefact store cannot be used; a database that cannot be has the same error and is waited for too."""
    return isinstance(error, Unavailable)


def is_of_files(error: AttnError) -> bool:
    """Whether something could not be written, or the artefact store cannot be used."""
    return is_of_disk(error) or is_of_store(error)


def as_disk_error(path: Any, error: OSError) -> OSError | CheckpointWriteFailed:
    """A full disk as the error that is waited out; any other error as it is."""
    return CheckpointWriteFailed.of(path, error) if error.errno in FULL else error
