"""One attempt at a job: the input of its worker, the messages that it sends, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
from attn_schema.training import Checkpoint, JobError, LogLine, Metrics, TrainingConfig

from attn_train.records import Stop


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The input of a worker. With `threads` None, torch's number of threads is left unchanged.

    With `artifacts`, the URL of an artefact store, checkpoints are kept there. A group of workers, which may run on
    other machines than the supervisor, then also publishes its finished model there, for the tenant `owner`.
    """

    job_id: str
    attempt: int
    config: TrainingConfig
    home: Path
    threads: int | None = None
    artifacts: str | None = None
    owner: str = ""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Assignment:
        """Return the assignment of these plain values."""
        converted = {"config": TrainingConfig.from_mapping(values["config"]), "home": Path(values["home"])}
        return cls(**{**values, **converted})


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """The input of a worker process: its part, `rank`, of an attempt, and the HOST:PORT where its group meets.

    `assignment` are the plain values of an `Assignment`.
    """

    assignment: dict[str, Any]
    rank: int
    address: str


@dataclass(frozen=True, kw_only=True)
class TrainingStarted:
    """The model is loaded, and training begins at `step`, from `checkpoint` (None: from initial weights)."""

    step: int
    checkpoint: Checkpoint | None


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The worker finished a step or an evaluation batch, or is now in what `doing` says. Sent every few seconds, and
    when `doing` changes; not recorded."""

    doing: str = ""


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """The worker waits for the cause of `error` to go away, such as a full disk."""

    error: JobError


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The worker no longer waits, and continues."""


@dataclass(frozen=True, kw_only=True)
class Flush:
    """A worker process asks its parent to answer with `RECEIVED`, once everything sent before is recorded."""


RECEIVED = "received"

Message: TypeAlias = TrainingStarted | Heartbeat | Metrics | Checkpoint | LogLine | Stalled | Resumed
"""The messages of a worker to its supervisor."""

SendMessage: TypeAlias = Callable[[Message], None]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """All steps are done; the model is at `model_path`."""

    model_path: str


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The worker stopped because it was asked to."""

    stop: Stop


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The job failed with an error of its own: another attempt would fail in the same way."""

    error: JobError


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The worker was lost; another attempt may succeed."""

    error: JobError


Outcome: TypeAlias = Finished | Stopped | Failed | Lost

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        TrainingStarted, Heartbeat, Metrics, Checkpoint, LogLine, Stalled, Resumed, Flush,
        Finished, Stopped, Failed, Lost
    )
}  # fmt: skip


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """A message or an outcome, in the form in which a worker process sends it: with the name of its class."""

    kind: str
    content: msgspec.Raw

    @classmethod
    def of(cls, value: Message | Flush | Outcome) -> Sent:
        """Pack a message or an outcome."""
        return cls(type(value).__name__, msgspec.Raw(msgspec.msgpack.encode(value)))

    def value(self) -> Message | Flush | Outcome:
        """Unpack it."""
        found: Message | Flush | Outcome = msgspec.msgpack.decode(self.content, type=KINDS[self.kind])
        return found


def outcome_of_all(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a group: the first failure, else the first lost worker, else that of the leading worker."""
    for kind in (Failed, Lost):
        for outcome in outcomes:
            if isinstance(outcome, kind):
                return outcome
    return outcomes[0]


class Worker(Protocol):
    """The supervisor's handle of a running worker."""

    def stop(self, stop: Stop) -> None:
        """Ask the worker to stop; returns at once."""
        ...

    def kill(self) -> None:
        """Kill the worker."""
        ...


class Backend(Protocol):
    """Starts workers, as processes or Ray actors."""

    def start(self, assignment: Assignment, send: SendMessage, ended: Callable[[Outcome], None]) -> Worker:
        """Start a worker. `send` gets its messages, in order, then `ended` gets its outcome; called from any thread."""
        ...
