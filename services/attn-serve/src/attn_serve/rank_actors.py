"""The other ranks of a model as Ray actors, which Ray ends with the actor of the first one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_core.errors import Unavailable
from attn_gateway.ray_gpus import gpu_request, known_gpus
from attn_host.ranks import RankGroup, RankTask, run_rank
from attn_schema import EngineConfig
from attn_schema.cores import rank_cores

log = logging.getLogger(__name__)


class RankActor:
    """One rank of a model."""

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def run(self, task: RankTask) -> None:
        """Be the rank until the first one stops; raises what ends it before."""
        run_rank(task)


class RankActors:
    """Implements `attn_host.ranks.RankLauncher`. On GPUs each rank has one to itself."""

    def __init__(self) -> None:
        import ray.util

        # What ranks tell each other is for nobody else: on one machine it does not leave it.
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        self.ip = "127.0.0.1" if len(nodes) == 1 else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._actors: list[Any] = []
        self._running: list[Any] = []

    def start(self, tasks: Sequence[RankTask]) -> None:
        """See `RankLauncher.start`; returns when all have processes."""
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
        return "it was told to"

    def stop(self, timeout: float) -> None:
        """See `RankLauncher.stop`."""
        import ray

        if self._running and timeout > 0:
            ray.wait(self._running, num_returns=len(self._running), timeout=timeout)
        for actor in self._actors:
            ray.kill(actor)


def actor_ranks(folder: Path, config: EngineConfig) -> RankGroup:
    """The other ranks as actors. Where one is lost, this process ends at once, so that Ray replaces it with all of
    them; requests go on then, or at another replica."""

    def lost(error: Exception) -> None:
        message = error.message if isinstance(error, Unavailable) else repr(error)
        log.error("the engine ends with a rank of its model: %s", message)
        os._exit(1)

    return RankGroup(folder, config, RankActors(), lost)


SPIN_COUNT = "10000"


def actor_environment(config: EngineConfig) -> dict[str, str]:
    """Environment variables of a process that computes."""
    # Threads that spin long while they wait for each other keep the processor from whoever else needs it.
    spin_count = os.environ.get("GOMP_SPINCOUNT", SPIN_COUNT)
    # Ray would give an actor without CPUs of its own one thread for tensor operations.
    return {"OMP_NUM_THREADS": str(config.num_threads), "GOMP_SPINCOUNT": spin_count}


def with_threads(config: EngineConfig) -> EngineConfig:
    """The config with the threads of each rank: its share of the cores of this machine, if it does not say."""
    return config.replace(num_threads=config.num_threads or rank_cores(config.tensor_parallel_size))
