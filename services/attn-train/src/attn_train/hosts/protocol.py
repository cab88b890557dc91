"""What the dispatcher asks of a host of supervisors."""

from __future__ import annotations

from typing import Protocol


class Host(Protocol):
    """Runs supervisors, one a job. Methods may block for seconds and are called from threads, one at a time."""

    def ensure(self, job_id: str) -> None:
        """Start the job's supervisor unless one is at work."""
        ...

    def alive(self, job_id: str) -> bool:
        """Whether a supervisor is at work on the job."""
        ...

    def nudge(self, job_id: str) -> None:
        """Tell the job's supervisor, if there is one, to look at the record now."""
        ...

    def stop(self, grace: float) -> None:
        """Leave: jobs that cannot go on without this process are suspended within about `grace` seconds."""
        ...
