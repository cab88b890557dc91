"""Where engines run: the devices and threads of this machine, shares of its GPUs, and the machines of a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from attn_core.errors import InvalidValue, OutOfCapacity
from attn_gateway.ray_gpus import GpuRequest, gpu_request, known_gpus
from attn_schema import DeploymentConfig, EngineConfig
from attn_schema.child_process import Child
from attn_schema.cores import brief_spins, rank_cores
from attn_schema.device import AUTO, VISIBLE, visible_gpus

from attn_serve.sources import weight_files

ROUNDING = 1e-6
ENGINE = "attn_serve.engine_server:main"


def fits_here(config: EngineConfig) -> bool:
    """Whether this machine has a device for each rank of an engine; ranks on the CPU share it."""
    on_gpu = config.device.startswith("cuda") or (config.device == AUTO and bool(visible_gpus()))
    return not on_gpu or config.tensor_parallel_size <= max(1, len(visible_gpus()))


class GpuShares:
    """Gives each engine on `cuda`, or `auto`, the GPU with the largest share of its memory left."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    @contextmanager
    def taken(self, config: EngineConfig) -> Iterator[Mapping[str, str]]:
        """The environment variables of an engine, whose share is reserved within the block.

        Raises `OutOfCapacity` if no GPU has a share of `gpu_memory_utilization` left. An engine on `cuda:INDEX`, or
        with several ranks, names its GPUs itself.
        """
        gpus, share = visible_gpus(), config.gpu_memory_utilization
        if config.device not in {AUTO, "cuda"} or config.tensor_parallel_size > 1 or not gpus:
            yield {} if config.device.startswith("cuda") or gpus else {VISIBLE: ""}
            return
        chosen = min(gpus, key=lambda gpu: self._shares.get(gpu, 0.0))
        left = 1.0 - self._shares.get(chosen, 0.0)
        if left + ROUNDING < share:
            raise OutOfCapacity(
                f"device {config.device} needs {share:g} of a GPU; the most that one has left is {left:g}: use a "
                "smaller --gpu-memory-utilization, or fewer models",
                device=config.device,
                needed_gpus=f"{share:g}",
                free_gpus=f"{left:g}",
            )
        self._shares[chosen] = self._shares.get(chosen, 0.0) + share
        try:
            yield {VISIBLE: chosen}
        finally:
            self._shares[chosen] -= share


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """The environment variables of a process that runs an engine."""
    # Without OMP_NUM_THREADS, Ray would limit an actor with `num_cpus=0` to one thread for tensor operations.
    return {"OMP_NUM_THREADS": str(config.num_threads), **brief_spins()}


def with_threads(config: EngineConfig) -> EngineConfig:
    """The config with `num_threads` set; by default each rank's share of the cores of this machine."""
    return config.replace(num_threads=config.num_threads or rank_cores(config.tensor_parallel_size))


class EngineProcesses:
    """Starts the processes of engines; the first one early, so that it imports torch while the server starts."""

    def __init__(self, early: EngineConfig | None = None) -> None:
        self._spare: tuple[Mapping[str, str], Child] | None = None
        if early is not None:
            environment = engine_environment(with_threads(early))
            self._spare = environment, Child(ENGINE, environment)

    def start(self, environment: Mapping[str, str]) -> Child:
        """Return a process that waits for an `EngineTask`."""
        if self._spare is not None and self._spare[0] == environment:
            (_, spare), self._spare = self._spare, None
            return spare
        self.stop()
        return Child(ENGINE, environment)

    def stop(self) -> None:
        """End the process that has got no task, if there is one."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare[1].stop(0.0)


def replica_bytes(folder: Path, config: EngineConfig) -> int:
    """The minimum memory that a replica needs, in bytes: its weights as stored, and its KV cache."""
    return sum(path.stat().st_size for path in weight_files(folder)) + (config.kv_cache_memory_bytes or 0)


def rank_resources(folder: Path, config: EngineConfig, gpu: GpuRequest) -> dict[str, float]:
    """The Ray resources of each rank of a replica: a share of a GPU (a whole one with several ranks), or memory."""
    ranks = config.tensor_parallel_size
    if gpu.num_gpus:
        return {"GPU": gpu.num_gpus if ranks == 1 else 1.0}
    return {"memory": max(1, replica_bytes(folder, config) // ranks)}


def require_places(folder: Path, config: EngineConfig, deployment: DeploymentConfig) -> None:
    """Raise unless the machines of the cluster have room for all replicas; Ray would wait for room forever.

    `InvalidValue` if there is no room for one replica, `OutOfCapacity` if there is room for too few.
    """
    import ray

    wanted = deployment.max_replicas or deployment.at_first
    gpu = gpu_request(config.device, config.gpu_memory_utilization, known_gpus())
    ranks, ((kind, share),) = config.tensor_parallel_size, rank_resources(folder, config, gpu).items()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    what = f"{share:g} of a GPU" if kind == "GPU" else f"{share / 2**30:.2f} GiB of memory"
    what = what if ranks == 1 else f"{ranks} times {what}"
    # The ranks of a replica may be on several machines.
    places = sum(math.floor(node.get(kind, 0.0) / max(share, 1e-6) + 1e-6) for node in nodes) // ranks
    if not places:
        largest = max((node.get("memory", 0.0) for node in nodes), default=0.0) / 2**30
        raise InvalidValue.of(
            "source",
            str(folder),
            f"a model that fits: a replica needs {what}; the largest machine has {largest:.2f} GiB",
        )
    if places < wanted:
        field = "max_replicas" if deployment.max_replicas else "replicas"
        raise OutOfCapacity(
            f"{field}: {wanted} replicas cannot be placed: each needs {what}, and the cluster has room for {places}",
            field=field,
            given=wanted,
            room=places,
        )
