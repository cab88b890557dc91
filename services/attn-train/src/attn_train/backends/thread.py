"""Workers as threads of this process: for tests, notebooks and laptops without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable

from attn_train.attempt import Assignment, Outcome, Tell
from attn_train.loop.stop import Stop, StopFlag


class ThreadWorker:
    """A worker in a thread."""

    def __init__(self) -> None:
        self.flag = StopFlag()

    def stop(self, stop: Stop) -> None:
        """Read before the next step."""
        self.flag.set(stop)

    def kill(self) -> None:
        """A thread cannot be killed: it ends before its next step."""
        self.flag.set(Stop.DISCARD)


class ThreadBackend:
    """Runs each worker in a thread. Dropout draws from the generator of the process: run one job at a time."""

    def start(self, assignment: Assignment, tell: Tell, ended: Callable[[Outcome], None]) -> ThreadWorker:
        """Start the thread."""
        from attn_train.worker import work

        worker = ThreadWorker()

        def run() -> None:
            ended(work(assignment, tell, worker.flag))

        threading.Thread(target=run, name=f"train {assignment.job_id}", daemon=True).start()
        return worker
