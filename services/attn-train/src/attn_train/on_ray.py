"""Supervisors and workers as Ray actors."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from attn_core.errors import InvalidValue, Unavailable
from attn_gateway.ray_gpus import free_gpus, gpu_request, known_gpus
from attn_schema.training import JobError, LogLine

from attn_train.attempt import Assignment, Failed, Lost, Message, Outcome, SendMessage
from attn_train.job_queue import Room
from attn_train.process_tuning import keep_freed_memory, spin_briefly
from attn_train.ray_group import RayGroup
from attn_train.records import Stop, StopFlag
from attn_train.supervisor import SERVER_STOPS, Supervisor, SupervisorSettings


class RayWorkerActor:
    """The actor of the training process. `work` runs in one thread, `stop` in another."""

    def __init__(self) -> None:
        keep_freed_memory()
        spin_briefly()
        self._flag = StopFlag()
        self._last: Any = None

    def work(self, assignment: Assignment, supervisor: Any) -> Outcome:
        """Run an attempt; its messages are sent directly to the supervisor's actor."""
        from attn_train.worker import work

        def send(message: Message) -> None:
            # The result is not awaited; calls from one actor to another arrive in order.
            self._last = supervisor.receive.remote(assignment.attempt, message)

        def flush() -> None:
            if self._last is not None:
                ray.get(self._last)

        return work(assignment, send, self._flag, flush)

    def stop(self, stop: Stop) -> None:
        """Ask the training loop to stop."""
        self._flag.set(stop)


class RayWorker:
    """The supervisor's handle of a worker; `actor` is None if none could be started."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def stop(self, stop: Stop) -> None:
        """Forward to the actor."""
        if self._actor is not None:
            self._actor.stop.remote(stop)

    def kill(self) -> None:
        """Kill the actor's process."""
        if self._actor is not None:
            ray.kill(self._actor)


class RayBackend:
    """Starts workers as Ray actors; `supervisor` is the supervisor's actor, on whose machine a single worker runs.

    A worker reserves only one of Ray's logical CPUs, whatever its number of threads, and on a CUDA device `gpus` of a
    GPU. It waits until they are free.
    """

    def __init__(self, supervisor: Any, gpus: float) -> None:
        self._supervisor = supervisor
        self._gpus = gpus

    def start(
        self, assignment: Assignment, send: SendMessage, ended: Callable[[Outcome], None]
    ) -> RayWorker | RayGroup:
        """Start the worker's actor, or those of several workers, which may be on any machines of the cluster.

        Actors send messages directly to the supervisor's actor; `send` gets a log line if a worker must wait for a GPU.
        A job for a CUDA device fails if Ray knows no GPU.
        """
        if assignment.config.workers > 1:
            group = RayGroup(self._supervisor, self._gpus)
            group.begin(assignment, send, ended)
            return group
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            gpu = gpu_request(assignment.config.device, self._gpus, known_gpus())
        except InvalidValue as error:
            ended(Failed(error=JobError.of(error)))
            return RayWorker(None)
        assignment = replace(assignment, config=assignment.config.replace(device=gpu.device))
        if gpu.num_gpus > free_gpus():
            send(LogLine(text=f"waits for {gpu.num_gpus:g} GPU; {free_gpus():g} of {known_gpus():g} are free"))
        node = ray.get_runtime_context().get_node_id()
        options = {
            "num_cpus": 1,
            "num_gpus": gpu.num_gpus,
            "runtime_env": {"env_vars": dict(gpu.env_vars)},
            "max_concurrency": 2,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor: Any = ray.remote(RayWorkerActor).options(**options).remote()
        result = actor.work.remote(assignment, self._supervisor)

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
        return Lost(error=JobError.of(lost))
    return outcome


NAMESPACE = "attn"
POLL_SECONDS = 0.1
ANSWER_SECONDS = 30.0
FOREVER = -1


def actor_name(job_id: str) -> str:
    """Return the name of the actor of the job's supervisor, in Ray's namespace `attn`."""
    return f"train/{job_id}"


class RaySupervisorActor:
    """An actor that runs a supervisor in a thread; Ray restarts it if its process dies."""

    def __init__(self, job_id: str, settings: SupervisorSettings) -> None:
        me = ray.get_runtime_context().current_actor
        self._supervisor = Supervisor(job_id, RayBackend(me, settings.gpus), settings)
        self._thread = threading.Thread(target=self._run, args=(me,), daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Whether the supervisor is still running."""
        return self._thread.is_alive()

    def receive(self, attempt: int, message: Message) -> None:
        """Forward a worker's message to the supervisor."""
        self._supervisor.receive(attempt, message)

    def check_now(self) -> None:
        """Make the supervisor read the job's record now."""
        self._supervisor.check_now()

    def suspend(self, why: str = SERVER_STOPS) -> None:
        """Make the supervisor put the job back into the queue."""
        self._supervisor.suspend(why)

    def _run(self, me: Any) -> None:
        self._supervisor.run()
        # The job is done, and the server may have stopped, so the actor ends itself.
        ray.kill(me, no_restart=True)


class RayHost:
    """Runs supervisors as actors on the machine with the records. `private`: the cluster ends with this process."""

    def __init__(self, settings: SupervisorSettings, *, private: bool) -> None:
        self._settings = settings
        self._private = private
        self._actors: dict[str, Any] = {}

    def ensure(self, job_id: str) -> None:
        """Start the supervisor's actor, unless it exists."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self.alive(job_id):
            return
        node = ray.get_runtime_context().get_node_id()
        options = {
            "name": actor_name(job_id),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": FOREVER,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor_type = ray.remote(RaySupervisorActor).options(**options)
        self._actors[job_id] = actor_type.remote(job_id, self._settings)

    def alive(self, job_id: str) -> bool:
        """Whether the actor exists and reports that its supervisor is running."""
        actor = self._actor(job_id)
        if actor is None:
            return False
        try:
            answer: bool = ray.get(actor.alive.remote(), timeout=ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            # The actor is probably still starting on a busy machine.
            return True
        except ray.exceptions.RayError:
            answer = False
        if not answer:
            self._actors.pop(job_id, None)
        return answer

    def check_now(self, job_id: str) -> None:
        """Forward to the actor."""
        actor = self._actor(job_id)
        if actor is not None:
            actor.check_now.remote()

    def suspend(self, job_id: str, why: str) -> None:
        """Forward to the actor."""
        actor = self._actor(job_id)
        if actor is not None:
            actor.suspend.remote(why)

    def room(self) -> Room:
        """Return the logical CPUs and GPUs of all Ray nodes together."""
        known: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return Room(jobs=math.inf, cpus=known.get("CPU", 0.0), gpus=known.get("GPU", 0.0))

    def stop(self, shutdown_timeout: float) -> None:
        """Suspend the jobs of a private cluster; on a shared cluster they go on."""
        if not self._private:
            return
        for actor in self._actors.values():
            actor.suspend.remote()
        deadline = time.monotonic() + shutdown_timeout
        while time.monotonic() < deadline and any(self.alive(job_id) for job_id in list(self._actors)):
            time.sleep(POLL_SECONDS)

    def _actor(self, job_id: str) -> Any:
        if job_id not in self._actors:
            try:
                self._actors[job_id] = ray.get_actor(actor_name(job_id), namespace=NAMESPACE)
            except ValueError:
                return None
        return self._actors[job_id]
