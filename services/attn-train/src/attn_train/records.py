"""The records of jobs, and the allowed transitions between their states."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol, TypeAlias

from attn_core.errors import WrongState
from attn_schema.training import Checkpoint, JobState, LogLine, Metrics, StateChange, TrainingJob


class Stop(StrEnum):
    """How to stop a job."""

    SAVE = "save"
    """Stop after writing a checkpoint."""
    DISCARD = "discard"
    """Stop at once, without a checkpoint."""


class StopFlag:
    """A flag that any thread can set; the training loop reads it before every step."""

    def __init__(self) -> None:
        self._stop: Stop | None = None

    def set(self, stop: Stop) -> None:
        """Ask to stop; a later DISCARD overrules an earlier SAVE."""
        if self._stop is not Stop.DISCARD:
            self._stop = stop

    def get(self) -> Stop | None:
        """Return how to stop, or None to continue."""
        return self._stop


class JobRecord(TrainingJob, frozen=True, kw_only=True):
    """The record of a job.

    `number` orders jobs by submission. `owner` is the tenant that the job belongs to; jobs with an empty owner are
    visible to all tenants. `failures` counts lost workers, and `stop` is how the job was asked to stop.
    """

    number: int
    owner: str = ""
    failures: int = 0
    stop: Stop | None = None

    def public(self) -> TrainingJob:
        """Return the part of the record that clients receive."""
        return TrainingJob(**{name: getattr(self, name) for name in TrainingJob.__struct_fields__})


Payload: TypeAlias = StateChange | Metrics | Checkpoint | LogLine
"""The payload of a `JobEvent`."""

S = JobState
FINAL_STATES = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED})

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    S.QUEUED: frozenset({S.STARTING, S.CANCELLING, S.CANCELLED, S.FAILED}),
    S.STARTING: frozenset({S.RUNNING, S.RECOVERING, S.STALLED, S.CANCELLING, S.QUEUED}) | FINAL_STATES,
    S.RUNNING: frozenset({S.RECOVERING, S.STALLED, S.CANCELLING, S.QUEUED}) | FINAL_STATES,
    S.RECOVERING: frozenset({S.RUNNING, S.RECOVERING, S.STALLED, S.CANCELLING, S.QUEUED}) | FINAL_STATES,
    S.STALLED: frozenset({S.RUNNING, S.RECOVERING, S.CANCELLING, S.QUEUED}) | FINAL_STATES,
    # A run may end by itself before it receives the request to stop.
    S.CANCELLING: FINAL_STATES,
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset({S.QUEUED}),
    S.CANCELLED: frozenset({S.QUEUED}),
}


def require_transition(job_id: str, current: JobState, following: JobState) -> None:
    """Raise `WrongState` unless the state `following` may come after `current`."""
    if following not in TRANSITIONS[current]:
        message = f"job {job_id!r} is {current}; it cannot become {following}"
        raise WrongState(message, job=job_id, state=current)


class Reporter(Protocol):
    """Receives the progress of a run, in order, in the thread of the training loop; methods must return quickly."""

    def heartbeat(self) -> None:
        """Report that an update or an evaluation batch was done."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Report metrics, by name, after `step` updates."""
        ...

    def checkpoint(self, step: int, where: str, size: int) -> None:
        """Report a complete checkpoint of `size` bytes at the path or URL `where`."""
        ...

    def log(self, text: str) -> None:
        """Report a log line."""
        ...

    def flush(self) -> None:
        """Return once everything reported is recorded; called before a checkpoint is written, so that a run that
        resumes from it has lost nothing, whoever was killed."""
        ...


class NullReporter:
    """A reporter that discards everything."""

    def heartbeat(self) -> None:
        """Do nothing."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def checkpoint(self, step: int, where: str, size: int) -> None:
        """Do nothing."""

    def log(self, text: str) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""
