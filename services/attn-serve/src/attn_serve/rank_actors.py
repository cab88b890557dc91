"""Ranks 1 and up of a tensor-parallel model as Ray actors, which Ray ends together with the actor of rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_core.errors import Unavailable
from attn_engine.host.ranks import RankGroup, RankTask, run_rank
from attn_gateway.ray_gpus import gpu_request, known_gpus
from attn_schema import EngineConfig
from attn_schema.cores import rank_cores

log = logging.getLogger(__name__)


class RankActor:
    """A Ray actor that runs one rank of a model."""

    def pid(self) -> int:
        """The id of the actor's process."""
        return os.getpid()

    def run(self, task: RankTask) -> None:
        """Run the rank until rank 0 stops; raises the error that ends it before."""
        run_rank(task)


class RankActors:
    """Implements `attn_engine.host.ranks.RankLauncher` with Ray actors. On GPUs each rank has a whole one to itself."""

    def __init__(self) -> None:
        import ray.util

        # Messages between ranks are private: on a single machine they stay on the loopback interface.
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        self.ip = "127.0.0.1" if len(nodes) == 1 else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._actors: list[Any] = []
        self._running: list[Any] = []

    def start(self, tasks: Sequence[RankTask]) -> None:
        """See `RankLauncher.start`; returns when the processes of all ranks have started."""
        import ray

        for task in tasks:
            gpu = gpu_request(task.config.device, 1.0, known_gpus())
            variables = {**actor_environment(task.config), **gpu.env_vars}
            kind = ray.remote(RankActor).options(
                num_cpus=0, num_gpus=gpu.num_gpus, max_restarts=0, runtime_env={"env_vars": variables}
            )
            self._actors.append(kind.remote())
        pids = ray.get([actor.pid.remote() for actor in self._actors])
        log.info("ranks run in the processes %s", pids)
        self._running = [actor.run.remote(task) for actor, task in zip(self._actors, tasks, strict=True)]

    def ended(self) -> str | None:
        """See `RankLauncher.ended`."""
        import ray

        done, _ = ray.wait(self._running, timeout=0)
        if not done:
            return None
        try:
            ray.get(done[0])
        except ray.exceptions.RayError as error:
            return str(error).strip().splitlines()[-1]
        return "its process finished"

    def stop(self, timeout: float) -> None:
        """See `RankLauncher.stop`."""
        import ray

        if self._running and timeout > 0:
            ray.wait(self._running, num_returns=len(self._running), timeout=timeout)
        for actor in self._actors:
            ray.kill(actor)


def actor_ranks(folder: Path, config: EngineConfig) -> RankGroup:
    """The other ranks as actors. If one is lost, this process exits at once, so that Ray replaces all ranks; requests
    continue after that, or on another replica."""

    def lost(error: Exception) -> None:
        message = error.message if isinstance(error, Unavailable) else repr(error)
        log.error("the engine exits, as a rank of its model has ended: %s", message)
        os._exit(1)

    return RankGroup(folder, config, RankActors(), lost)


SPIN_COUNT = "10000"


def actor_environment(config: EngineConfig) -> dict[str, str]:
    """The environment variables of a process that runs an engine."""
    # OpenMP threads that spin for long while they wait for each other take processor time from other processes.
    spin_count = os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT)
    # Without OMP_NUM_THREADS, Ray would limit an actor with `num_cpus=0` to one thread for tensor operations.
    return {"OMP_NUM_THREADS": str(config.num_threads), "GOMP_SPINCOUNT": spin_count}


def with_threads(config: EngineConfig) -> EngineConfig:
    """The config with `num_threads` set; by default each rank's share of the cores of this machine."""
    return config.replace(num_threads=config.num_threads or rank_cores(config.tensor_parallel_size))
