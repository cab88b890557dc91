"""One attempt at a job: what its worker gets, sends and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from attn_train.records import CheckpointRecord, ErrorRecord, LogLine, MetricsRecord, Stop
from attn_train.spec import TrainingSpec


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a worker is given. `threads` None leaves torch's threads as they are."""

    job_id: str
    attempt: int
    spec: TrainingSpec
    home: Path
    threads: int | None = None

    def plain(self) -> dict[str, Any]:
        """Plain values, which `from_plain` turns back."""
        return dataclasses.asdict(self) | {"home": str(self.home)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Assignment:
        """The assignment of plain values written by `plain`."""
        return cls(**{**values, "home": Path(values["home"]), "spec": TrainingSpec.from_plain(values["spec"])})


@dataclass(frozen=True, kw_only=True)
class TrainingStarted:
    """The model is there and training goes on from `step`, where `checkpoint` is (None: from the start)."""

    step: int
    checkpoint: CheckpointRecord | None


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The worker is not stuck: it made an update, or a batch of an evaluation. Told now and then, not recorded."""


Message: TypeAlias = TrainingStarted | Heartbeat | MetricsRecord | CheckpointRecord | LogLine
"""What a worker tells while it works."""

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
    """Another attempt would end the same way."""

    error: ErrorRecord


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The worker is gone; another may do better."""

    error: ErrorRecord


Outcome: TypeAlias = Finished | Stopped | Failed | Lost


class Worker(Protocol):
    """A worker at work, seen from the supervisor."""

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
