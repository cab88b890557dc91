"""One attempt at a job: what its worker gets, sends and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from attn_schema.training import Checkpoint, JobError, LogLine, Metrics, TrainingConfig

from attn_train.records import Stop


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a worker is given. `threads` None leaves torch's threads as they are.

    With `artifacts`, a URL, checkpoints are there, and several workers, which may be on other machines than their
    supervisor, publish their model there, for the tenant `owner`.
    """

    job_id: str
    attempt: int
    config: TrainingConfig
    home: Path
    threads: int | None = None
    artifacts: str | None = None
    owner: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingStarted:
    """The model is there and training goes on from `step`, where `checkpoint` is (None: from the start)."""

    step: int
    checkpoint: Checkpoint | None


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The worker finished a step or an evaluation batch. Sent every few seconds, not recorded."""


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """The worker waits for what `error` says."""

    error: JobError


@dataclass(frozen=True, kw_only=True)
class GoesOn:
    """What the worker waited for is there again."""


Message: TypeAlias = TrainingStarted | Heartbeat | Metrics | Checkpoint | LogLine | Stalled | GoesOn
"""What a worker sends to its supervisor."""

SendMessage: TypeAlias = Callable[[Message], None]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """All steps done; the model is at `model_path`."""

    model_path: str


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Stopped as asked."""

    stop: Stop


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The job itself is wrong: another attempt would fail in the same way."""

    error: JobError


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The worker was lost; another attempt may succeed."""

    error: JobError


Outcome: TypeAlias = Finished | Stopped | Failed | Lost


class Worker(Protocol):
    """A running worker, as its supervisor sees it."""

    def stop(self, stop: Stop) -> None:
        """Ask it to stop; returns at once."""
        ...

    def kill(self) -> None:
        """End it without asking."""
        ...


class Backend(Protocol):
    """Where workers run."""

    def start(self, assignment: Assignment, send: SendMessage, ended: Callable[[Outcome], None]) -> Worker:
        """Start a worker. `send` gets its messages in order, then `ended` its outcome, from any thread."""
        ...
