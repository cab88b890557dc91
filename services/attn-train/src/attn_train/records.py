"""Jobs, their states and their events, as they are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from attn_core.errors import AttnError, WrongState

from attn_train.spec import TrainingSpec


class Stop(StrEnum):
    """How to stop."""

    SAVE = "save"
    """Write a checkpoint first."""
    DISCARD = "discard"
    """At once."""


class StopFlag:
    """Set by any thread, read by the loop before every step."""

    def __init__(self) -> None:
        self._stop: Stop | None = None

    def set(self, stop: Stop) -> None:
        """Ask to stop; a later DISCARD overrules an earlier SAVE."""
        if self._stop is not Stop.DISCARD:
            self._stop = stop

    def get(self) -> Stop | None:
        """How to stop, or None to go on."""
        return self._stop


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether the job has come to rest."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """An error as it is kept: the stable word, the message, the facts."""

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: AttnError) -> ErrorRecord:
        """The record of an error."""
        return cls(reason=error.reason, message=error.message, metadata=error.metadata)

    def error(self) -> AttnError:
        """The error again, of the class that has its reason."""
        kind = _by_reason(AttnError, self.reason) or AttnError
        error = kind.__new__(kind)
        AttnError.__init__(error, self.message, **self.metadata)
        return error


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A complete checkpoint: its step, its folder, its bytes, when it was there (seconds since 1970)."""

    step: int
    path: str
    size: int
    time: float


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """The state changed; `error` says why, where something went wrong."""

    previous: JobState
    current: JobState
    error: ErrorRecord | None = None


@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """Values measured when `step` updates were done, by name."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line for people."""

    text: str


Payload: TypeAlias = StateChange | MetricsRecord | CheckpointRecord | LogLine


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened; ids count from 1 within a job, without gaps. Times are seconds since 1970."""

    id: int
    time: float
    attempt: int
    payload: Payload


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it is. `number` orders jobs by submission; `stop` is how it was asked to stop, if it was."""

    id: str
    number: int
    spec: TrainingSpec
    state: JobState
    attempt: int
    failures: int
    step: int
    metrics: Mapping[str, float]
    checkpoint: CheckpointRecord | None
    error: ErrorRecord | None
    stop: Stop | None
    model_path: str
    created: float
    started: float | None
    ended: float | None
    last_event: int


def _by_reason(kind: type[AttnError], reason: str) -> type[AttnError] | None:
    if kind.reason == reason:
        return kind
    return next((found for child in kind.__subclasses__() if (found := _by_reason(child, reason))), None)


S = JobState
FINAL_STATES = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED})

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    S.QUEUED: frozenset({S.STARTING, S.CANCELLING, S.CANCELLED, S.FAILED}),
    S.STARTING: frozenset({S.RUNNING, S.RECOVERING, S.CANCELLING, S.QUEUED}) | FINAL_STATES,
    S.RUNNING: frozenset({S.RECOVERING, S.CANCELLING, S.QUEUED}) | FINAL_STATES,
    S.RECOVERING: frozenset({S.RUNNING, S.RECOVERING, S.CANCELLING, S.QUEUED}) | FINAL_STATES,
    # A run may end by itself before it hears that it should stop.
    S.CANCELLING: FINAL_STATES,
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset({S.QUEUED}),
    S.CANCELLED: frozenset({S.QUEUED}),
}


def require_transition(job_id: str, current: JobState, following: JobState) -> None:
    """Raises WrongState unless `following` may come after `current`."""
    if following not in TRANSITIONS[current]:
        message = f"job {job_id!r} is {current}; it cannot become {following}"
        raise WrongState(message, job=job_id, state=current)
