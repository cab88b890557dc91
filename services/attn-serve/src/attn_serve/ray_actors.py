"""The Ray actors of a model: its replicas, and the other ranks of a tensor-parallel one, which end with rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_core.errors import AttnError, InternalError
from attn_engine.host.ranks import RankGroup, RankTask, run_rank
from attn_gateway import ReplicaTls
from attn_gateway.ray_gpus import gpu_request, known_gpus
from attn_gateway.standstills import freeze_gc_heap
from attn_schema import EngineConfig

from attn_serve.engine_server import EngineServer, exit_without_rank
from attn_serve.placement import engine_environment
from attn_serve.replica_messages import ReplicaAddress

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
            variables = {**engine_environment(task.config), **gpu.env_vars}
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
    """The other ranks as actors; if one is lost, this process exits, so that Ray replaces all ranks."""
    return RankGroup(folder, config, RankActors(), exit_without_rank)


class ModelReplica:
    """The class that Ray Serve deploys: an `EngineServer` with health checks, load reports and shutdown.

    An error of loading is stored, and raised by `address`.
    """

    async def __init__(  # type: ignore[misc]
        self,
        folder: Path,
        config: EngineConfig,
        shutdown_timeout: float,
        tls: ReplicaTls | None = None,
        model: str = "",
    ) -> None:
        import ray.util

        self._server = EngineServer(folder, config, actor_ranks, tls, model)
        self._shutdown_timeout = shutdown_timeout
        self._error: AttnError | None = None
        self._error_reported = False
        try:
            await self._server.start(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        except AttnError as error:
            self._error = error
        freeze_gc_heap()

    async def address(self) -> ReplicaAddress:
        """The address at which the replica listens; raises the error of loading its model."""
        if self._error is not None:
            self._error_reported = True
            raise self._error
        address = self._server.address_now()
        if address is None:
            raise InternalError("the replica has no address")
        return address

    async def check_health(self) -> None:
        """Raise if the engine has ended, or loading failed and `address` reported it, so that Ray Serve replaces it."""
        if self._error_reported and self._error is not None:
            raise self._error
        if not self._server.engine.alive:
            raise InternalError("the engine has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The number of running and waiting requests of the engine, for `replicas_for_load`."""
        if self._error is not None:
            return {"requests": 0.0}
        stats = await self._server.engine.stats()
        return {"requests": float(stats.running + stats.waiting)}

    async def __del__(self) -> None:
        """Drain the server; Ray Serve calls this when it removes the replica."""
        await self._server.drain(self._shutdown_timeout)
