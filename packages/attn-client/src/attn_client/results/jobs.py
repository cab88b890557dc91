"""What the server says of training jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from attn.v1 import training_pb2 as pb
from attn_core.errors import AttnError
from google.protobuf.timestamp_pb2 import Timestamp

from attn_client.errors import from_status


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
    UNKNOWN = "unknown"

    @property
    def final(self) -> bool:
        """Whether nothing more happens to the job by itself."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @classmethod
    def of(cls, value: pb.JobState.ValueType) -> JobState:
        """From the wire; a state newer than this client is unknown."""
        name = pb.JobState.Name(value).removeprefix("JOB_STATE_") if value in pb.JobState.values() else ""
        return cls.__members__.get(name, cls.UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint: steps done, its folder on the server, its size in bytes."""

    step: int
    path: str
    size_bytes: int

    @classmethod
    def of(cls, message: pb.Checkpoint) -> Checkpoint:
        """From the wire."""
        return cls(step=message.step, path=message.path, size_bytes=message.size_bytes)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job. `spec` is what it was asked to do, `error` why it failed, `model_path` its finished model."""

    id: str
    state: JobState
    attempt: int
    step: int
    steps: int
    metrics: Mapping[str, float]
    checkpoint: Checkpoint | None
    error: AttnError | None
    created: datetime | None
    ended: datetime | None
    last_event_id: int
    model_path: str
    spec: pb.TrainingSpec

    @classmethod
    def of(cls, message: pb.TrainingJob) -> Job:
        """From the wire."""
        return cls(
            id=message.id,
            state=JobState.of(message.state),
            attempt=message.attempt,
            step=message.step,
            steps=message.spec.optimizer.steps,
            metrics=dict(message.last_metrics),
            checkpoint=Checkpoint.of(message.latest_checkpoint) if message.HasField("latest_checkpoint") else None,
            error=from_status(message.error) if message.HasField("error") else None,
            created=_time(message.create_time) if message.HasField("create_time") else None,
            ended=_time(message.end_time) if message.HasField("end_time") else None,
            last_event_id=message.last_event_id,
            model_path=message.model_path,
            spec=message.spec,
        )


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """The job changed its state; `error` says why where it failed or recovers."""

    previous: JobState
    current: JobState
    error: AttnError | None


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Values measured after `step` optimiser steps; losses in nats a token."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """A line for people."""

    text: str


Payload = StateChange | Metrics | Checkpoint | LogLine | None
"""What happened; None for a kind of event that is newer than this client."""


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """Something that happened to a job; ids rise by one."""

    id: int
    time: datetime
    attempt: int
    payload: Payload

    @classmethod
    def of(cls, message: pb.JobEvent) -> JobEvent:
        """From the wire."""
        return cls(id=message.event_id, time=_time(message.time), attempt=message.attempt, payload=_payload(message))


def _payload(message: pb.JobEvent) -> Payload:
    match message.WhichOneof("payload"):
        case "state_change":
            change = message.state_change
            return StateChange(
                previous=JobState.of(change.previous),
                current=JobState.of(change.current),
                error=from_status(change.error) if change.HasField("error") else None,
            )
        case "metrics":
            return Metrics(step=message.metrics.step, values=dict(message.metrics.values))
        case "checkpoint":
            return Checkpoint.of(message.checkpoint)
        case "log":
            return LogLine(text=message.log.text)
        case _:
            return None


def _time(stamp: Timestamp) -> datetime:
    return stamp.ToDatetime(tzinfo=UTC)
