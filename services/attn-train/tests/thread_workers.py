"""Workers as threads of the tests' own process: they begin at once, and read what a test has replaced."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from attn_train.attempt import Assignment, Outcome, SendMessage
from attn_train.dispatcher import Host
from attn_train.job_queue import Room
from attn_train.processes import LocalHost
from attn_train.records import Stop, StopFlag
from attn_train.service import TrainingGrpc
from attn_train.worker import work


class ThreadWorker:
    def __init__(self) -> None:
        self.flag = StopFlag()

    def stop(self, stop: Stop) -> None:
        self.flag.set(stop)

    def kill(self) -> None:
        """Make the thread end before its next step, as a thread cannot be killed."""
        self.flag.set(Stop.DISCARD)


class ThreadBackend:
    """Dropout uses the process's global generator, so only one job may run at a time."""

    def start(self, assignment: Assignment, send: SendMessage, ended: Callable[[Outcome], None]) -> ThreadWorker:
        worker = ThreadWorker()

        def run() -> None:
            ended(work(assignment, send, worker.flag))

        threading.Thread(target=run, name=f"train {assignment.job_id}", daemon=True).start()
        return worker


class TrainingInThreads(TrainingGrpc):
    """The service with everything in threads of this process."""

    async def make_host(self) -> Host:
        return LocalHost(self.supervisor_settings(), ThreadBackend(), Room(jobs=math.inf, cpus=math.inf))
