"""Calls of the training service."""

from __future__ import annotations

from typing import Any

from attn.v1 import training_pb2 as pb
from attn_schema.codec import from_message, to_message
from attn_schema.estimate import JobEstimate
from attn_schema.training import JobEvent, TrainingConfig, TrainingJob

from attn_client.operations import Operation, Page

SERVICE = "/attn.v1.TrainingService"


def submit(
    config: TrainingConfig, job_id: str, *, validate_only: bool, priority: int = 0
) -> Operation[pb.SubmitTrainingJobResponse, TrainingJob]:
    """Submit a job."""
    request = pb.SubmitTrainingJobRequest(
        config=to_message(config), job_id=job_id, validate_only=validate_only, priority=priority
    )
    method, repeatable = f"{SERVICE}/SubmitTrainingJob", bool(job_id) or validate_only
    return Operation(method, request, pb.SubmitTrainingJobResponse, _job, repeatable)


def estimate(config: TrainingConfig, job_id: str) -> Operation[pb.EstimateTrainingJobResponse, JobEstimate]:
    """Estimate the cost of a job."""
    request = pb.EstimateTrainingJobRequest(config=to_message(config), job_id=job_id)

    def estimated(answer: pb.EstimateTrainingJobResponse) -> JobEstimate:
        return from_message(JobEstimate, answer.estimate)

    return Operation(f"{SERVICE}/EstimateTrainingJob", request, pb.EstimateTrainingJobResponse, estimated)


def get(job_id: str) -> Operation[pb.GetTrainingJobResponse, TrainingJob]:
    """Get one job."""
    request = pb.GetTrainingJobRequest(id=job_id)
    return Operation(f"{SERVICE}/GetTrainingJob", request, pb.GetTrainingJobResponse, _job)


def list_jobs(token: str) -> Operation[pb.ListTrainingJobsResponse, Page[TrainingJob]]:
    """List jobs, one page for each call."""
    request = pb.ListTrainingJobsRequest(page_token=token)

    def page(answer: pb.ListTrainingJobsResponse) -> Page[TrainingJob]:
        return Page([from_message(TrainingJob, job) for job in answer.jobs], answer.next_page_token)

    return Operation(f"{SERVICE}/ListTrainingJobs", request, pb.ListTrainingJobsResponse, page)


def watch(job_id: str, after: int) -> Operation[pb.WatchTrainingJobResponse, TrainingJob | JobEvent | None]:
    """Stream the job, then its events with ids above `after`; None for a heartbeat."""
    request = pb.WatchTrainingJobRequest(id=job_id, after_event_id=after)

    def update(answer: pb.WatchTrainingJobResponse) -> TrainingJob | JobEvent | None:
        match answer.WhichOneof("kind"):
            case "job":
                return from_message(TrainingJob, answer.job)
            case "event":
                return from_message(JobEvent, answer.event)
            case _:
                return None

    return Operation(f"{SERVICE}/WatchTrainingJob", request, pb.WatchTrainingJobResponse, update)


def cancel(job_id: str, *, discard: bool) -> Operation[pb.CancelTrainingJobResponse, TrainingJob]:
    """Ask a job to stop."""
    request = pb.CancelTrainingJobRequest(id=job_id, discard=discard)
    return Operation(f"{SERVICE}/CancelTrainingJob", request, pb.CancelTrainingJobResponse, _job)


def resume(job_id: str) -> Operation[pb.ResumeTrainingJobResponse, TrainingJob]:
    """Restart a job."""
    request = pb.ResumeTrainingJobRequest(id=job_id)
    return Operation(f"{SERVICE}/ResumeTrainingJob", request, pb.ResumeTrainingJobResponse, _job)


def delete(job_id: str, *, cancel: bool) -> Operation[pb.DeleteTrainingJobResponse, str]:
    """Delete a job with its files."""
    request = pb.DeleteTrainingJobRequest(id=job_id, cancel=cancel)

    def kept(answer: pb.DeleteTrainingJobResponse) -> str:
        return answer.kept_model_path

    return Operation(f"{SERVICE}/DeleteTrainingJob", request, pb.DeleteTrainingJobResponse, kept, repeatable=False)


def _job(answer: Any) -> TrainingJob:
    return from_message(TrainingJob, answer.job)
