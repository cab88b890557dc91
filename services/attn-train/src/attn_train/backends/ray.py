"""Workers as Ray actors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ray
from attn_core.errors import Unavailable

from attn_train.attempt import Assignment, Lost, Message, Outcome, Tell
from attn_train.jobs.record import ErrorRecord
from attn_train.loop.stop import Stop, StopFlag
from attn_train.process import keep_freed_memory, spin_briefly


class RayWorkerActor:
    """The process that trains. `work` runs in one thread while `stop` is heard in another."""

    def __init__(self) -> None:
        keep_freed_memory()
        spin_briefly()
        self._flag = StopFlag()
        self._last: Any = None

    def work(self, assignment: dict[str, Any], supervisor: Any) -> Outcome:
        """Do an attempt; its messages go straight to the supervisor's actor."""
        from attn_train.worker import work

        given = Assignment.from_plain(assignment)

        def tell(message: Message) -> None:
            # Nobody waits for the answer, but calls of one actor to another arrive in order.
            self._last = supervisor.hear.remote(given.attempt, message)

        def flush() -> None:
            if self._last is not None:
                ray.get(self._last)

        return work(given, tell, self._flag, flush)

    def stop(self, stop: Stop) -> None:
        """Ask the loop to stop."""
        self._flag.set(stop)


class RayWorker:
    """A worker seen from its supervisor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def stop(self, stop: Stop) -> None:
        """Pass it on."""
        self._actor.stop.remote(stop)

    def kill(self) -> None:
        """End the process."""
        ray.kill(self._actor)


class RayBackend:
    """Starts workers on the machine of the supervisor, whose actor is `supervisor`.

    A worker takes one of Ray's logical CPUs, so that others find room, and as many threads as its assignment says.
    """

    def __init__(self, supervisor: Any) -> None:
        self._supervisor = supervisor

    def start(self, assignment: Assignment, tell: Tell, ended: Callable[[Outcome], None]) -> RayWorker:  # noqa: ARG002
        """Start the actor; `tell` is not called, as the supervisor's actor hears directly."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = ray.get_runtime_context().get_node_id()
        options = {
            "num_cpus": 1,
            "max_concurrency": 2,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor: Any = ray.remote(RayWorkerActor).options(**options).remote()
        result = actor.work.remote(assignment.plain(), self._supervisor)

        def wait() -> None:
            outcome = _outcome(result)
            ray.kill(actor)
            ended(outcome)

        threading.Thread(target=wait, name=f"wait for {assignment.job_id}", daemon=True).start()
        return RayWorker(actor)


def _outcome(result: Any) -> Outcome:
    try:
        outcome: Outcome = ray.get(result)
    except ray.exceptions.RayError as error:
        lost = Unavailable(f"the worker was lost: {str(error).splitlines()[0]}")
        return Lost(error=ErrorRecord.of(lost))
    return outcome
