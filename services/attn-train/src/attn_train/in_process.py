"""Supervisors and workers as threads of this process, for tests, notebooks and machines without Ray."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from attn_core.errors import Incompatible
from attn_schema.training import JobError

from attn_train.attempt import Assignment, Failed, Outcome, SendMessage
from attn_train.job_queue import Room
from attn_train.records import Stop, StopFlag
from attn_train.supervisor import Supervisor, SupervisorSettings


class ThreadWorker:
    """A worker in a thread."""

    def __init__(self) -> None:
        self.flag = StopFlag()

    def stop(self, stop: Stop) -> None:
        """Set the flag, which is read before the next step."""
        self.flag.set(stop)

    def kill(self) -> None:
        """Make the thread end before its next step, as a thread cannot be killed."""
        self.flag.set(Stop.DISCARD)


class ThreadBackend:
    """Runs each worker in a thread. Dropout uses the process's global generator, so run only one job at a time."""

    def start(self, assignment: Assignment, send: SendMessage, ended: Callable[[Outcome], None]) -> ThreadWorker:
        """Start the thread; a job with several workers fails, as these need processes of their own."""
        from attn_train.worker import work

        if assignment.config.workers > 1:
            message = "several workers need Ray, without which this server runs: use workers=1"
            ended(Failed(error=JobError.of(Incompatible(message, field="config.workers"))))
            return ThreadWorker()

        worker = ThreadWorker()

        def run() -> None:
            ended(work(assignment, send, worker.flag))

        threading.Thread(target=run, name=f"train {assignment.job_id}", daemon=True).start()
        return worker


class ThreadHost:
    """Runs supervisors and workers in this process."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._running: dict[str, tuple[Supervisor, threading.Thread]] = {}

    def ensure(self, job_id: str) -> None:
        """Start a thread for the supervisor, unless it is running."""
        if self.alive(job_id):
            return
        supervisor = Supervisor(job_id, ThreadBackend(), self._settings)
        thread = threading.Thread(target=supervisor.run, name=f"supervise {job_id}", daemon=True)
        self._running[job_id] = supervisor, thread
        thread.start()

    def alive(self, job_id: str) -> bool:
        """Whether the supervisor's thread is running."""
        found = self._running.get(job_id)
        if found is not None and not found[1].is_alive():
            del self._running[job_id]
            return False
        return found is not None

    def check_now(self, job_id: str) -> None:
        """Forward to the job's supervisor."""
        if self.alive(job_id):
            self._running[job_id][0].check_now()

    def suspend(self, job_id: str, why: str) -> None:
        """Forward to the job's supervisor."""
        if self.alive(job_id):
            self._running[job_id][0].suspend(why)

    def room(self) -> Room:
        """Return unlimited resources, as the CPUs of threads are not accounted for."""
        return Room(jobs=math.inf, cpus=math.inf)

    def stop(self, shutdown_timeout: float) -> None:
        """Suspend all jobs and wait for them."""
        deadline = time.monotonic() + shutdown_timeout
        for supervisor, _ in self._running.values():
            supervisor.suspend()
        for _, thread in self._running.values():
            thread.join(max(0.0, deadline - time.monotonic()))
