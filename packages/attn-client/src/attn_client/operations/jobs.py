"""Calls of the training service."""

from __future__ import annotations

from typing import Any

from attn_schema import methods as rows
from attn_schema.estimate import JobEstimate
from attn_schema.training import JobEvent, TrainingConfig, TrainingJob

from attn_client.operations import Operation, Page


def submit(config: TrainingConfig, job_id: str, *, validate_only: bool, priority: int = 0) -> Operation[TrainingJob]:
    """Submit a job."""
    request = rows.SubmitTrainingJobRequest(
        config=config, job_id=job_id, validate_only=validate_only, priority=priority
    )
    return Operation(rows.SUBMIT_TRAINING_JOB, request, _job, repeatable=bool(job_id) or validate_only)


def estimate(config: TrainingConfig, job_id: str) -> Operation[JobEstimate]:
    """Estimate the cost of a job."""

    def estimated(answer: rows.EstimateTrainingJobResponse) -> JobEstimate:
        return answer.estimate

    request = rows.EstimateTrainingJobRequest(config=config, job_id=job_id)
    return Operation(rows.ESTIMATE_TRAINING_JOB, request, estimated)


def get(job_id: str) -> Operation[TrainingJob]:
    """Get one job."""
    return Operation(rows.GET_TRAINING_JOB, rows.GetTrainingJobRequest(id=job_id), _job)


def list_jobs(token: str) -> Operation[Page[TrainingJob]]:
    """List jobs, one page for each call."""

    def page(answer: rows.ListTrainingJobsResponse) -> Page[TrainingJob]:
        return Page(answer.jobs, answer.next_page_token)

    return Operation(rows.LIST_TRAINING_JOBS, rows.ListTrainingJobsRequest(page_token=token), page)


def watch(job_id: str, after: int) -> Operation[TrainingJob | JobEvent | None]:
    """Stream the job, then its events with ids above `after`; None for a heartbeat."""

    def update(answer: rows.WatchTrainingJobResponse) -> TrainingJob | JobEvent | None:
        return answer.event if answer.job is None else answer.job

    return Operation(rows.WATCH_TRAINING_JOB, rows.WatchTrainingJobRequest(id=job_id, after_event_id=after), update)


def cancel(job_id: str, *, discard: bool) -> Operation[TrainingJob]:
    """Ask a job to stop."""
    return Operation(rows.CANCEL_TRAINING_JOB, rows.CancelTrainingJobRequest(id=job_id, discard=discard), _job)


def resume(job_id: str) -> Operation[TrainingJob]:
    """Restart a job."""
    return Operation(rows.RESUME_TRAINING_JOB, rows.ResumeTrainingJobRequest(id=job_id), _job)


def delete(job_id: str, *, cancel: bool) -> Operation[str]:
    """Delete a job with its files."""

    def kept(answer: rows.DeleteTrainingJobResponse) -> str:
        return answer.kept_model_path

    return Operation(rows.DELETE_TRAINING_JOB, rows.DeleteTrainingJobRequest(id=job_id, cancel=cancel), kept)


def _job(answer: Any) -> TrainingJob:
    job: TrainingJob = answer.job
    return job
