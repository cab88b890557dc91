"""Jobs and events as messages of the wire."""

from __future__ import annotations

from attn.v1 import training_pb2 as pb
from attn_gateway import status_of
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.status_pb2 import Status

from attn_train.jobs.record import (
    CheckpointRecord,
    ErrorRecord,
    Event,
    Job,
    JobState,
    LogLine,
    MetricsRecord,
    StateChange,
)
from attn_train.service.spec_messages import spec_message

STATES = {state: pb.JobState.Value(f"JOB_STATE_{state.name}") for state in JobState}


def job_message(job: Job) -> pb.TrainingJob:
    """The message of a job."""
    return pb.TrainingJob(
        id=job.id,
        spec=spec_message(job.spec),
        state=STATES[job.state],
        attempt=job.attempt,
        step=job.step,
        last_metrics=job.metrics,
        latest_checkpoint=_checkpoint(job.checkpoint) if job.checkpoint else None,
        error=_status(job.error),
        create_time=timestamp(job.created),
        start_time=None if job.started is None else timestamp(job.started),
        end_time=None if job.ended is None else timestamp(job.ended),
        last_event_id=job.last_event,
        model_path=job.model_path,
    )


def event_message(event: Event) -> pb.JobEvent:
    """The message of an event."""
    message = pb.JobEvent(event_id=event.id, time=timestamp(event.time), attempt=event.attempt)
    match event.payload:
        case StateChange() as change:
            state = pb.StateChange(
                previous=STATES[change.previous], current=STATES[change.current], error=_status(change.error)
            )
            message.state_change.CopyFrom(state)
        case MetricsRecord() as metrics:
            message.metrics.CopyFrom(pb.Metrics(step=metrics.step, values=metrics.values))
        case CheckpointRecord() as checkpoint:
            message.checkpoint.CopyFrom(_checkpoint(checkpoint))
        case LogLine() as line:
            message.log.text = line.text
    return message


def timestamp(seconds: float) -> Timestamp:
    """The message of seconds since 1970."""
    message = Timestamp()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def _checkpoint(record: CheckpointRecord) -> pb.Checkpoint:
    return pb.Checkpoint(step=record.step, path=record.path, size_bytes=record.size, create_time=timestamp(record.time))


def _status(record: ErrorRecord | None) -> Status | None:
    return None if record is None else status_of(record.error())
