"""Training jobs."""

from __future__ import annotations

from attn.v1 import training_pb2 as pb

from attn_client.operations import Operation, Page
from attn_client.results.jobs import Job, JobEvent

SERVICE = "/attn.v1.TrainingService"


def submit(spec: pb.TrainingSpec, job_id: str, *, validate_only: bool) -> Operation[pb.SubmitTrainingJobResponse, Job]:
    """Record and start a job."""
    request = pb.SubmitTrainingJobRequest(spec=spec, job_id=job_id, validate_only=validate_only)
    return Operation(
        f"{SERVICE}/SubmitTrainingJob", request, pb.SubmitTrainingJobResponse, lambda answer: Job.of(answer.job)
    )


def get(job_id: str) -> Operation[pb.GetTrainingJobResponse, Job]:
    """One job."""
    request = pb.GetTrainingJobRequest(id=job_id)
    return Operation(f"{SERVICE}/GetTrainingJob", request, pb.GetTrainingJobResponse, lambda answer: Job.of(answer.job))


def list_jobs(token: str) -> Operation[pb.ListTrainingJobsResponse, Page[Job]]:
    """A page of jobs."""
    request = pb.ListTrainingJobsRequest(page_token=token)

    def page(answer: pb.ListTrainingJobsResponse) -> Page[Job]:
        return Page([*map(Job.of, answer.jobs)], answer.next_page_token)

    return Operation(f"{SERVICE}/ListTrainingJobs", request, pb.ListTrainingJobsResponse, page)


def watch(job_id: str, after: int) -> Operation[pb.WatchTrainingJobResponse, Job | JobEvent | None]:
    """The job and its events after one; None for a heartbeat."""
    request = pb.WatchTrainingJobRequest(id=job_id, after_event_id=after)

    def update(answer: pb.WatchTrainingJobResponse) -> Job | JobEvent | None:
        match answer.WhichOneof("kind"):
            case "job":
                return Job.of(answer.job)
            case "event":
                return JobEvent.of(answer.event)
            case _:
                return None

    return Operation(f"{SERVICE}/WatchTrainingJob", request, pb.WatchTrainingJobResponse, update)


def cancel(job_id: str, *, discard: bool) -> Operation[pb.CancelTrainingJobResponse, Job]:
    """Ask a job to stop."""
    request = pb.CancelTrainingJobRequest(id=job_id, discard=discard)
    return Operation(
        f"{SERVICE}/CancelTrainingJob", request, pb.CancelTrainingJobResponse, lambda answer: Job.of(answer.job)
    )


def resume(job_id: str) -> Operation[pb.ResumeTrainingJobResponse, Job]:
    """Start a job again."""
    request = pb.ResumeTrainingJobRequest(id=job_id)
    return Operation(
        f"{SERVICE}/ResumeTrainingJob", request, pb.ResumeTrainingJobResponse, lambda answer: Job.of(answer.job)
    )
