"""Starts or joins Ray in this process, and ends it without leftovers. All calls block, and use the same thread."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import socket
from types import ModuleType
from typing import Any

import psutil
import structlog
from attn_core.errors import cleaning_up

from attn_gateway.ray_folder import RayFolder, remove_abandoned
from attn_gateway.ray_patience import patience

log = structlog.get_logger()

NAMESPACE = "attn"
"""The Ray namespace of all named actors."""

ATTEMPTS = 2
"""How often starting a private Ray is tried, as its processes may end in their start."""

CONTROL_STORE_SECONDS = "300"
"""How long Ray waits for its control store, while that runs; its own default may be too short on a busy machine."""

NICENESS = "0"
"""The niceness of a private Ray's workers; Ray's default of 15 lets other processes take nearly all processor time."""

KNOCK_SECONDS = 5.0
"""How long a cluster may take to accept a connection."""

EXIT_SECONDS = 5.0
"""How long processes of a private Ray may take to end by themselves."""


class RayProcess:
    """A private Ray if `address` is None, else the cluster there; call `start` and `stop` from the same thread."""

    def __init__(self, address: str | None, cpus: int | None, object_store_bytes: int) -> None:
        self._address = address
        self._cpus = cpus
        self._object_store_bytes = object_store_bytes
        self._touched = False
        self._folder: RayFolder | None = None
        self._processes: list[psutil.Process] = []

    def start(self) -> None:
        """Start or join Ray; raises Ray's errors, `ImportError`, and `OSError` if nothing listens at the address."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self._address is not None:
            knock(self._address)
            self._init(address=self._address)
        else:
            self._start_private()

    def abandon(self) -> None:
        """Kill a private Ray without waiting and remove its folder; for a process about to exit, from any thread."""
        for parent in self._processes:
            for process in _family(parent):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        if self._folder is not None:
            self._folder.remove()

    def _start_private(self) -> None:
        # A token for this cluster alone keeps out other users of this machine.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_worker_niceness", NICENESS)  # as Ray spells it
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", CONTROL_STORE_SECONDS)
        importlib.import_module("ray")  # before anything that would have to be tried again, or removed
        _read_token_again()
        remove_abandoned()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._try_private()
                break
            except Exception as error:
                with cleaning_up("Ray"):
                    self.stop()
                if attempt == ATTEMPTS:
                    raise
                log.warning("Ray did not start, trying again", reason=str(error))

    def stop(self) -> None:
        """Leave Ray; a private one ends with all its processes and its folder."""
        if not self._touched:
            return
        import ray

        below = [process for parent in self._processes for process in _family(parent)]
        ray.shutdown()
        _, alive = psutil.wait_procs(below, timeout=EXIT_SECONDS)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=EXIT_SECONDS)
        self._processes = []
        if self._folder is not None:
            self._folder.remove()
        self._folder, self._touched = None, False

    def _try_private(self) -> None:
        self._folder = RayFolder()
        before = set(psutil.Process().children())
        try:
            with patience():
                self._init(
                    address="local",
                    num_cpus=self._cpus,
                    include_dashboard=False,
                    object_store_memory=self._object_store_bytes,
                    _temp_dir=str(self._folder.path),
                )
        finally:
            self._processes = [child for child in psutil.Process().children() if child not in before]

    def _init(self, **arguments: Any) -> None:
        import ray

        module: ModuleType = ray
        if module.is_initialized():
            raise RuntimeError("Ray is already started in this process")
        self._touched = True
        module.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **arguments)


def _read_token_again() -> None:
    """Make Ray read the environment again: it does so when imported, which may have been before the token was set."""
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def knock(address: str) -> None:
    """Raise `OSError` if nothing listens at `address`: Ray would try for a minute and then exit this process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()


def _family(parent: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants; empty if it has ended."""
    try:
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
