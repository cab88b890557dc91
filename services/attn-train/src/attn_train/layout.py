"""Where the files of jobs lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attn_core.home import models_folder


@dataclass(frozen=True)
class Layout:
    """Paths below the home folder."""

    home: Path

    @property
    def store(self) -> Path:
        """The records of all jobs."""
        return self.home / "jobs" / "jobs.sqlite3"

    @property
    def data(self) -> Path:
        """Texts that may be named by path from anywhere."""
        return self.home / "data"

    def job(self, job_id: str) -> Path:
        """The folder of one job."""
        return self.home / "jobs" / job_id

    def checkpoints(self, job_id: str) -> Path:
        """The folder of its checkpoints."""
        return self.job(job_id) / "checkpoints"

    def worker_lock(self, job_id: str) -> Path:
        """Held by the process that trains."""
        return self.job(job_id) / "worker.lock"

    def supervisor_lock(self, job_id: str) -> Path:
        """Held by what watches over the worker."""
        return self.job(job_id) / "supervisor.lock"

    def model(self, job_id: str) -> Path:
        """The finished model."""
        return models_folder(self.home) / job_id
