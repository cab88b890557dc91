"""Supervisors as threads of this process, and workers as child processes on this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
from attn_core.errors import Unavailable
from attn_schema.child_process import Child
from attn_schema.cores import brief_spins
from attn_schema.device import AUTO, VISIBLE, visible_gpus
from attn_schema.training import JobError

from attn_train.attempt import (
    RECEIVED,
    Assignment,
    Backend,
    Finished,
    Flush,
    Lost,
    Outcome,
    SendMessage,
    Sent,
    WorkerTask,
    outcome_of_all,
)
from attn_train.job_queue import Room
from attn_train.records import Stop
from attn_train.supervisor import Supervisor, SupervisorSettings

LOOPBACK = "127.0.0.1"
OTHERS_SECONDS = 20.0
"""How long the other workers may take to end by themselves after one worker has ended without finishing."""
EXIT_SECONDS = 10.0
"""How long a worker may take to exit after its outcome."""


class Gpus:
    """The CUDA devices that this process sees, shared by the workers of all jobs."""

    def __init__(self) -> None:
        self._names = visible_gpus()
        self._workers: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self._names)

    def take(self, device: str) -> str | None:
        """Return the device with the fewest workers for a new worker; None if its `device` needs none or is named."""
        if not self._names or device not in (AUTO, "cuda"):
            return None
        with self._lock:
            name = min(self._names, key=self._workers.__getitem__)
            self._workers[name] += 1
        return name

    def give_back(self, name: str | None) -> None:
        """Free the device of a worker that has ended."""
        with self._lock:
            if name is not None:
                self._workers[name] -= 1


class WorkerProcesses:
    """The supervisor's handle of the worker processes of an attempt, which start and end together."""

    def __init__(self, assignment: Assignment, gpus: Gpus) -> None:
        self._assignment = assignment
        self._names = [gpus.take(assignment.config.device) for _ in range(assignment.config.workers)]
        self._gpus = gpus
        self._children: list[Child] = []
        with ExitStack() as undo:
            undo.callback(self._give_back)
            undo.callback(self.kill)
            for name in self._names:
                self._children.append(_started(name))
            undo.pop_all()
        self._outcomes: dict[int, Outcome] = {}
        self._changed = threading.Condition()

    def begin(self, send: SendMessage, ended: Callable[[Outcome], None]) -> None:
        """Give the workers their tasks; `ended` is called with their common outcome, from another thread."""
        address = free_address(LOOPBACK)
        assignment = msgspec.to_builtins(self._assignment, enc_hook=str)
        for rank, child in enumerate(self._children):
            child.send(WorkerTask(assignment=assignment, rank=rank, address=address))
            threading.Thread(target=self._follow, args=(rank, send), daemon=True).start()

        def run() -> None:
            outcome = self._outcome()
            self._give_back()
            ended(outcome)

        threading.Thread(target=run, name=f"workers of {self._assignment.job_id}", daemon=True).start()

    def stop(self, stop: Stop) -> None:
        """Forward to the leading worker, which informs the others."""
        self._children[0].send(stop)

    def kill(self) -> None:
        """Kill all workers."""
        for child in self._children:
            child.kill()

    def _give_back(self) -> None:
        for name in self._names:
            self._gpus.give_back(name)

    def _follow(self, rank: int, send: SendMessage) -> None:
        """Receive the messages of a worker until its outcome."""
        child = self._children[rank]
        found: Outcome | None = None
        for sent in child.messages(Sent):
            message = sent.value()
            if isinstance(message, Outcome):
                found = message
                break
            if isinstance(message, Flush):
                child.send(RECEIVED)
            else:
                send(message)
        how = child.ended(EXIT_SECONDS)
        if how is None:
            child.kill()
            how = child.ended(EXIT_SECONDS)
        lost = Lost(error=JobError.of(Unavailable(f"the worker was lost: it {how}")))
        with self._changed:
            self._outcomes[rank] = found or lost
            self._changed.notify_all()

    def _outcome(self) -> Outcome:
        """Wait until all workers have ended, and kill those that wait in vain for one that has not finished."""

        def all_ended() -> bool:
            return len(self._outcomes) == len(self._children)

        def unfinished() -> bool:
            return any(not isinstance(outcome, Finished) for outcome in self._outcomes.values())

        with self._changed:
            self._changed.wait_for(lambda: all_ended() or unfinished())
            if not self._changed.wait_for(all_ended, OTHERS_SECONDS):
                self.kill()
                self._changed.wait_for(all_ended)
            return outcome_of_all([self._outcomes[rank] for rank in range(len(self._children))])


def _started(gpu: str | None) -> Child:
    return Child("attn_train.group_worker:main", brief_spins() | ({} if gpu is None else {VISIBLE: gpu}))


def free_address(host: str) -> str:
    """Return a free HOST:PORT of this machine, for the workers' process group."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


class ProcessBackend:
    """Starts workers as child processes, each on the CUDA device that has the fewest if the job needs one."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def start(self, assignment: Assignment, send: SendMessage, ended: Callable[[Outcome], None]) -> WorkerProcesses:
        """Start all workers of an attempt; raises `Unavailable` if the machine has no room for a process."""
        workers = WorkerProcesses(assignment, self._gpus)
        workers.begin(send, ended)
        return workers


class LocalHost:
    """Runs supervisors as threads of this process; `room` are the resources of this machine."""

    def __init__(self, settings: SupervisorSettings, backend: Backend, room: Room) -> None:
        self._settings = settings
        self._backend = backend
        self._room = room
        self._running: dict[str, tuple[Supervisor, threading.Thread]] = {}

    def ensure(self, job_id: str) -> None:
        """Start a thread for the supervisor, unless it is running."""
        if self.alive(job_id):
            return
        supervisor = Supervisor(job_id, self._backend, self._settings)
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
        """Return the resources of this machine."""
        return self._room

    def stop(self, shutdown_timeout: float) -> None:
        """Suspend all jobs and wait for them."""
        deadline = time.monotonic() + shutdown_timeout
        for supervisor, _ in self._running.values():
            supervisor.suspend()
        for _, thread in self._running.values():
            thread.join(max(0.0, deadline - time.monotonic()))
