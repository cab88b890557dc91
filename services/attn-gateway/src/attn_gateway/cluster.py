"""The Ray cluster that services run on: a private local one, or the one at RAY_ADDRESS."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from attn_core.errors import InvalidValue, MissingPackage, Unavailable
from attn_schema import ClusterConfig, DeploymentConfig, EngineConfig
from attn_schema.home import home_folder

from attn_gateway.ray_process import RayProcess
from attn_gateway.settings import ReplicaTls


@dataclass(frozen=True, kw_only=True)
class ModelToLoad:
    """A model to serve: its name in requests, its source (a folder or registered name), and its own configs.

    `engine` and `deployment` replace the server's configs.
    """

    name: str
    source: str
    engine: EngineConfig | None = None
    deployment: DeploymentConfig | None = None

    @classmethod
    def of(cls, config: ClusterConfig) -> tuple[ModelToLoad, ...]:
        """The models of a config file."""
        return tuple(
            cls(name=name, source=entry.source or name, engine=entry.engine, deployment=entry.deployment)
            for name, entry in config.models.items()
        )

    @classmethod
    def parse(cls, text: str) -> ModelToLoad:
        """Parse `NAME`, `NAME=PATH` or a path with a `/`, whose last part is the name; raises `InvalidValue`."""
        name, equals, source = text.partition("=")
        if not name or (equals and not source):
            raise InvalidValue.of("model", text, "NAME, NAME=PATH or a PATH with a /")
        if "/" in name:
            folder = Path(text).expanduser()
            name, source = folder.resolve().name, str(folder)
        return cls(name=name, source=source or name)


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """How to reach or start the Ray cluster, and the settings of this installation that services need.

    Models and jobs run on the cluster with `ray` or an `address`, or if they need more than this machine has, else as
    processes of this machine; raises `MissingPackage` if Ray is asked for and not installed. Without `address` a
    private cluster is started on this machine, with `cpus` logical CPUs (None: all), also those of jobs without Ray,
    and an object store of `object_store_bytes`. `models` are loaded at the start, with the configs `engine` and
    `deployment`, then the LoRA `adapters` on them. With `replica_tls`, gateways and replicas communicate over TLS.
    """

    ray: bool = False
    address: str | None = None
    cpus: int | None = None
    object_store_bytes: int = 256 * 2**20
    home: Path = field(default_factory=home_folder)
    models: tuple[ModelToLoad, ...] = ()
    adapters: tuple[ModelToLoad, ...] = ()
    engine: EngineConfig = field(default_factory=EngineConfig)
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)
    replica_tls: ReplicaTls | None = None

    def __post_init__(self) -> None:
        if self.uses_ray and not is_installed("ray"):
            raise MissingPackage.of("ray", "--ray" if self.address is None else "RAY_ADDRESS")

    @property
    def uses_ray(self) -> bool:
        """Whether everything runs on Ray, even if this machine is enough for it."""
        return self.ray or self.address is not None


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


class Cluster:
    """The Ray cluster, started by the first service that needs it and shut down with all processes that it started."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        # Ray ends its processes with the thread that started them, so this thread lives as long as they do.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        self._ray = RayProcess(settings.address, settings.cpus, settings.object_store_bytes)
        self._lock = asyncio.Lock()
        self._started = False

    @property
    def home(self) -> Path:
        """The folder of models, jobs and their records, which may not exist yet."""
        return self.settings.home

    @property
    def models(self) -> tuple[ModelToLoad, ...]:
        """The models to load before the server is ready."""
        return self.settings.models

    async def start(self) -> None:
        """Start or join Ray, unless that is done already; afterwards Ray can be used in this process.

        Takes 2 to 10 seconds. Raises `MissingPackage` if Ray is not installed, `Unavailable` if it cannot be started or
        reached.
        """
        async with self._lock:
            if self._started:
                return
            try:
                await _finish(asyncio.wrap_future(self._thread.submit(self._ray.start)))
                self._started = True
            except ImportError as error:
                raise MissingPackage.of("ray", "using more than this machine") from error
            except Exception as error:
                # Ray has no exception class of its own for a failed start.
                address = self.settings.address
                what = f"reached at {address}" if address else "started on this machine"
                raise Unavailable(f"Ray cannot be {what}: {error}") from error
            finally:
                _take_signals_back()

    async def stop(self) -> None:
        """Leave the cluster; end a private one with all its processes and remove its folder."""
        async with self._lock:
            await _finish(asyncio.wrap_future(self._thread.submit(self._ray.stop)))
            self._started = False
            self._thread.shutdown()

    def abandon(self) -> None:
        """Kill a private cluster and remove its files, without waiting; only for a process that is about to exit."""
        self._ray.abandon()


def _take_signals_back() -> None:
    """Restore Python's signal handlers: Ray's native code replaces that of SIGTERM by one that aborts the process."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))


async def _finish(future: asyncio.Future[None]) -> None:
    """Wait until work in a thread ends, even when cancelled: a half-started cluster could not be shut down."""
    task = asyncio.ensure_future(future)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
