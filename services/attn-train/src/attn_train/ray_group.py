"""The workers of a job as Ray actors in one placement group, which start and end together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from attn_core.errors import InvalidValue, Unavailable
from attn_gateway.ray_gpus import GpuRequest, gpu_request, known_gpus
from attn_schema.text_files import lines_of
from attn_schema.training import JobError, LogLine, TrainingConfig

from attn_train.attempt import (
    Assignment,
    Failed,
    Finished,
    Lost,
    Message,
    Outcome,
    SendMessage,
    Stalled,
    Stopped,
    outcome_of_all,
)
from attn_train.process_tuning import keep_freed_memory, spin_briefly
from attn_train.processes import OTHERS_SECONDS, free_address
from attn_train.records import Stop, StopFlag

PLACED_SECONDS = 30.0
"""How long to wait for the placement of all workers before an elastic job tries with fewer."""
GROW_SECONDS = 15.0
"""Interval at which a group with fewer workers than requested checks whether there is room for more."""


class RayRankActor:
    """The actor of one worker of a group. `work` runs in one thread, `stop` in another."""

    def __init__(self) -> None:
        keep_freed_memory()
        spin_briefly()
        self._flag = StopFlag()
        self._last: Any = None

    def address(self) -> str:
        """Return a free HOST:PORT of this machine, for the workers' process group."""
        return free_address(str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]

    def work(self, assignment: Assignment, supervisor: Any, rank: int, address: str) -> Outcome:
        """Run this worker's part of an attempt; the leading worker sends messages directly to the supervisor."""
        from attn_train.group_worker import work_in_group

        def send(message: Message) -> None:
            # The result is not awaited; calls from one actor to another arrive in order.
            self._last = supervisor.receive.remote(assignment.attempt, message)

        def flush() -> None:
            if self._last is not None:
                ray.get(self._last)

        return work_in_group(assignment, rank, address, (send, flush), self._flag)

    def stop(self, stop: Stop) -> None:
        """Ask the training loop to stop."""
        self._flag.set(stop)


class RayGroup:
    """The supervisor's handle of the workers of an attempt, which are started and awaited in a separate thread."""

    def __init__(self, supervisor: Any, gpus: float) -> None:
        self._supervisor = supervisor
        self._gpus = gpus
        self._actors: list[Any] = []
        self._requested_stop: Stop | None = None
        self._killed = threading.Event()
        self._sizes: list[int] = []
        self._growing = False

    def begin(self, assignment: Assignment, send: SendMessage, ended: Callable[[Outcome], None]) -> None:
        """Start the workers; `ended` is called with their common outcome."""

        def run() -> None:
            try:
                outcome = self._run(assignment, send)
            except InvalidValue as error:
                outcome = Failed(error=JobError.of(error))
            except (ray.exceptions.RayError, Unavailable) as error:
                outcome = Lost(error=JobError.of(Unavailable(f"the workers were lost: {str(error).splitlines()[0]}")))
            ended(outcome)

        threading.Thread(target=run, name=f"workers of {assignment.job_id}", daemon=True).start()

    def stop(self, stop: Stop) -> None:
        """Forward to the leading worker, which informs the others."""
        self._requested_stop = stop
        if self._actors:
            self._actors[0].stop.remote(stop)

    def kill(self) -> None:
        """Kill all worker processes."""
        self._killed.set()
        for actor in list(self._actors):
            ray.kill(actor)

    def _run(self, assignment: Assignment, send: SendMessage) -> Outcome:
        gpu = gpu_request(assignment.config.device, self._gpus, known_gpus())
        config = assignment.config.replace(device=gpu.device)
        self._sizes = admitted_sizes(config)
        while True:
            placed = self._placed(config, gpu, send)
            if placed is None:
                return Stopped(stop=self._requested_stop or Stop.DISCARD)
            group, workers = placed
            try:
                outcome = self._work(replace(assignment, config=config.replace(workers=workers)), gpu, group)
            finally:
                self._end_actors()
                ray.util.remove_placement_group(group)
            # Only a stop that was made to add workers continues the attempt, and only if no other stop was requested.
            if (
                not (isinstance(outcome, Stopped) and self._growing and self._requested_stop is None)
                or self._killed.is_set()
            ):
                return outcome
            self._growing = False
            send(LogLine(text="there is room for more workers; training continues from a checkpoint"))

    def _work(self, assignment: Assignment, gpu: GpuRequest, group: Any) -> Outcome:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for bundle in range(assignment.config.workers):
            options = {
                "num_cpus": 1,
                "num_gpus": gpu.num_gpus,
                "runtime_env": {"env_vars": dict(gpu.env_vars)},
                "max_concurrency": 2,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            }
            self._actors.append(ray.remote(RayRankActor).options(**options).remote())
        if self._killed.is_set():
            return Stopped(stop=Stop.DISCARD)
        if self._requested_stop is not None:
            self._actors[0].stop.remote(self._requested_stop)
        address = ray.get(self._actors[0].address.remote())
        results = [
            actor.work.remote(assignment, self._supervisor, rank, address) for rank, actor in enumerate(self._actors)
        ]
        left = list(results)
        while left:
            ended, left = ray.wait(left, num_returns=1, timeout=GROW_SECONDS)
            if not ended:
                self._grow(assignment.config.workers, gpu)
            elif not isinstance(_outcome(ended[0]), Finished):
                # The other workers end too, or wait for this one in vain. After a worker that has finished, the
                # leading worker may still be saving the model.
                break
        ray.wait(results, num_returns=len(results), timeout=OTHERS_SECONDS)
        return outcome_of_all([_outcome(result) for result in results])

    def _grow(self, workers: int, gpu: GpuRequest) -> None:
        """If the cluster has room for a larger group, stop with a checkpoint, from which the larger group resumes."""
        if self._growing or self._requested_stop is not None:
            return
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        for size in self._sizes:
            more = size - workers
            if 0 < more <= free.get("CPU", 0.0) and more * gpu.num_gpus <= free.get("GPU", 0.0):
                self._growing = True
                self._actors[0].stop.remote(Stop.SAVE)
                return

    def _end_actors(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)

    def _placed(self, config: TrainingConfig, gpu: GpuRequest, send: SendMessage) -> tuple[Any, int] | None:
        """Return a placement group and its number of workers: all, or as many as have room if the job is elastic.

        A job that waits for room is STALLED until its workers begin. None if the job was asked to stop meanwhile.
        """
        reported = False
        while not self._killed.is_set() and self._requested_stop is None:
            for workers in self._sizes:
                bundle = {"CPU": 1.0, **({"GPU": gpu.num_gpus} if gpu.num_gpus else {})}
                group = ray.util.placement_group([bundle] * workers, strategy="PACK")
                if group.wait(PLACED_SECONDS):
                    if workers < config.workers:
                        room = f"there is room for {workers} of {config.workers} workers"
                        send(LogLine(text=f"{room}; training continues with them"))
                    return group, workers
                ray.util.remove_placement_group(group)
            if not reported:
                reported = True
                send(Stalled(error=JobError.of(no_room(min(self._sizes)))))
        return None


def no_room(workers: int) -> Unavailable:
    """Return the error of a job that waits because the cluster has no room for its workers."""
    known: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    there = " and ".join(f"{known.get(kind, 0.0):g} {kind}s" for kind in ("CPU", "GPU"))
    return Unavailable(f"no room for {workers} workers; the cluster has {there} in all")


def admitted_sizes(config: TrainingConfig) -> list[int]:
    """Return the allowed numbers of workers of a job, largest first.

    They are multiples of dp_shard · tp · cp for which the batch size is divisible by the number of data parallel parts.
    """
    inner = config.dp_shard * config.tp * config.cp
    least = config.workers if config.min_workers is None else config.min_workers
    sizes = [size for size in range(config.workers, least - 1, -1) if size % inner == 0]
    rows = config.optimizer.batch_size
    return [size for size in sizes if size == config.workers or rows % (size // (config.tp * config.cp)) == 0]


def _outcome(result: Any) -> Outcome:
    try:
        outcome: Outcome = ray.get(result, timeout=0.1)
    except (ray.exceptions.RayError, TimeoutError) as error:
        lines = lines_of(str(error)) or [type(error).__name__]
        return Lost(error=JobError.of(Unavailable(f"a worker was lost: {lines[0]}")))
    return outcome
