"""The Ray cluster that services run on: a private local one, or the one at RAY_ADDRESS."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
from attn_core.errors import InvalidValue, Unavailable
from attn_core.home import home_folder

NAMESPACE = "attn"
"""Ray namespace of all named actors."""

KNOCK_SECONDS = 5.0
"""How long a cluster may take to accept a connection."""

EXIT_SECONDS = 5.0
"""How long processes of a local cluster may take to end by themselves."""


@dataclass(frozen=True, kw_only=True)
class ModelToLoad:
    """A model to serve from the start: the name requests use, and a folder or registered name."""

    name: str
    source: str

    @classmethod
    def parse(cls, text: str) -> ModelToLoad:
        """From `NAME` or `NAME=PATH`; raises `InvalidValue`."""
        name, equals, source = text.partition("=")
        if not name or (equals and not source):
            raise InvalidValue.of("model", text, "NAME or NAME=PATH")
        return cls(name=name, source=source or name)


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """How to reach or make the cluster, and what services need to know of this installation.

    `address` None makes a private cluster on this machine, with `cpus` logical CPUs (None: all) and an object
    store of `object_store_bytes`.
    """

    address: str | None = None
    cpus: int | None = None
    object_store_bytes: int = 256 * 2**20
    home: Path = field(default_factory=home_folder)
    models: tuple[ModelToLoad, ...] = ()


class Cluster:
    """Ray, started by the first service that needs it and shut down with everything that was started."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        # Ray ties its processes to the life of the thread that starts them, so this thread lives as long as they do.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        self._lock = asyncio.Lock()
        self._started = False
        self._folder: Path | None = None
        self._processes: list[psutil.Process] = []

    @property
    def home(self) -> Path:
        """The folder for models, jobs and their records; it may not exist yet."""
        return self.settings.home

    @property
    def models(self) -> tuple[ModelToLoad, ...]:
        """The models to load before the server is ready."""
        return self.settings.models

    async def start(self) -> None:
        """Start or join Ray unless that is done; afterwards `import ray` and its calls work in this process.

        Takes 2 to 10 seconds. Raises `Unavailable` if Ray cannot be started or reached.
        """
        async with self._lock:
            if self._started:
                return
            try:
                await _finish(asyncio.wrap_future(self._thread.submit(self._init)))
            except (OSError, RuntimeError, ValueError) as error:
                where = self.settings.address or "on this machine"
                raise Unavailable(f"Ray cannot be reached or started {where}: {error}") from error
            finally:
                self._started = True
                _take_signals_back()

    async def stop(self) -> None:
        """Leave the cluster; end a private one with all its processes and remove its folder."""
        async with self._lock:
            if self._started:
                await _finish(asyncio.wrap_future(self._thread.submit(self._shutdown)))
            self._started = False
            self._thread.shutdown()

    def _init(self) -> None:
        local = self.settings.address is None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if local:
            # A token of its own keeps other users of this machine out; it must be set before ray is imported.
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            self._folder = Path(tempfile.mkdtemp(prefix="attn-ray-"))
        import ray

        if ray.is_initialized():
            raise RuntimeError("this process has started Ray already")
        private = {
            "num_cpus": self.settings.cpus,
            "include_dashboard": False,
            "object_store_memory": self.settings.object_store_bytes,
            "_temp_dir": str(self._folder),
        }
        if not local:
            _knock(str(self.settings.address))
        before = set(psutil.Process().children())
        try:
            self._join(ray, private if local else {})
        finally:
            self._processes = [child for child in psutil.Process().children() if child not in before]

    def _join(self, ray: ModuleType, private: dict[str, Any]) -> None:
        ray.init(
            address=self.settings.address or "local",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **private,
        )

    def _shutdown(self) -> None:
        import ray

        below = [process for parent in self._processes for process in _family(parent)]
        ray.shutdown()
        _, alive = psutil.wait_procs(below, timeout=EXIT_SECONDS)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=EXIT_SECONDS)
        self._processes = []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _take_signals_back() -> None:
    """Put Python's handlers in force again: Ray's native code takes SIGTERM, and aborts the process at it."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))


def _knock(address: str) -> None:
    """Raise `OSError` if nothing listens at `address`: Ray would end this process after a minute of trying."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()


def _family(parent: psutil.Process) -> list[psutil.Process]:
    """A process and all below it; nothing if it has ended."""
    try:
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


async def _finish(future: asyncio.Future[None]) -> None:
    """Wait for work in a thread to its end, also when cancelled meanwhile: half a cluster could not be shut down."""
    task = asyncio.ensure_future(future)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
