"""Supervisors as threads of this process, with their workers beside them: no Ray."""

from __future__ import annotations

import threading
import time

from attn_train.backends.thread import ThreadBackend
from attn_train.supervisor import Supervisor, SupervisorSettings


class ThreadHost:
    """Runs everything in this process."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._at_work: dict[str, tuple[Supervisor, threading.Thread]] = {}

    def ensure(self, job_id: str) -> None:
        """Start a thread."""
        if self.alive(job_id):
            return
        supervisor = Supervisor(job_id, ThreadBackend(), self._settings)
        thread = threading.Thread(target=supervisor.run, name=f"supervise {job_id}", daemon=True)
        self._at_work[job_id] = supervisor, thread
        thread.start()

    def alive(self, job_id: str) -> bool:
        """Whether its thread lives."""
        found = self._at_work.get(job_id)
        if found is not None and not found[1].is_alive():
            del self._at_work[job_id]
            return False
        return found is not None

    def nudge(self, job_id: str) -> None:
        """Pass it on."""
        if self.alive(job_id):
            self._at_work[job_id][0].nudge()

    def stop(self, grace: float) -> None:
        """Suspend all jobs and wait for them."""
        deadline = time.monotonic() + grace
        for supervisor, _ in self._at_work.values():
            supervisor.suspend()
        for _, thread in self._at_work.values():
            thread.join(max(0.0, deadline - time.monotonic()))
