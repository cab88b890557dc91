"""The life cycle of a server process: start, serve, drain; it leaves nothing behind at whatever point it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import attn_core
import psutil
import structlog
from attn_core.errors import AttnError, MissingPackage, cleaning_up
from attn_core.plugins.loader import PluginStatus

from attn_gateway.cluster import Cluster, ClusterSettings, ModelToLoad
from attn_gateway.gateway import Gateway, probe
from attn_gateway.ready_file import ReadyFile
from attn_gateway.records.database import Database, database_url
from attn_gateway.service import HttpServer, ServesModels, Service
from attn_gateway.settings import GatewaySettings
from attn_gateway.standstills import freeze_gc_heap

log = structlog.get_logger()


KILLED_SECONDS = 5.0
"""How long to wait for killed processes to end before their files are removed."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """The settings of `attn serve`; `shutdown_timeout` is how long running calls may take at the end, in seconds.

    `models_again` is called on SIGHUP and returns the models to serve from then on.
    """

    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    ready_file: Path | None = None
    shutdown_timeout: float = 10.0
    models_again: Callable[[], Sequence[ModelToLoad]] = tuple


MODEL_SERVICE = "attn.v1.ModelService"
Offer = Callable[[Cluster], Sequence[Service]]
"""Creates the services, given the cluster that they run on."""


async def serve(
    settings: ServeSettings, announce: Callable[[Gateway], None], offer: Offer | None = None
) -> signal.Signals:
    """Serve until SIGINT or SIGTERM, which is returned; `announce` is called when the server is ready.

    Raises `UserError` for a port in use, `MissingPackage` if models are configured and no service can serve them.

    The services are those of all plugins, or those that `offer` returns. A second signal does not wait: it kills all
    child processes and ends this process with code 130.
    """
    for port in (settings.gateway.port, settings.gateway.http_port):
        if port is not None:
            probe(settings.gateway.host, port)  # before anything is imported or started
    ready = ReadyFile(settings.ready_file)
    ready.clear()
    cluster = Cluster(settings.cluster)
    signals = _Signals(ready.remove, cluster.abandon)
    services = (offer or offered_services)(cluster)
    if settings.cluster.models and not any(MODEL_SERVICE in service.names for service in services):
        raise MissingPackage.of("attn-serve", "serving a model")
    gateway = Gateway(settings.gateway, services, offered_http_server(settings.gateway))
    applying: set[asyncio.Task[None]] = set()

    def reload() -> None:
        gateway.tenants.reload()
        task = asyncio.ensure_future(apply_models(settings, services))
        applying.add(task)
        task.add_done_callback(applying.discard)

    if hasattr(signal, "SIGHUP"):  # Windows has none
        on_signal(signal.SIGHUP, reload)
    try:
        await signals.unless_stopped(gateway.start())
        if not signals.stopped.is_set():
            freeze_gc_heap()
            ready.write(gateway)
            announce(gateway)
            await signals.stopped.wait()
        return signals.received
    finally:
        with cleaning_up("the ready file"):
            ready.remove()
        with cleaning_up("the gateway"):
            await gateway.stop(settings.shutdown_timeout)
        with cleaning_up("Ray"):
            await cluster.stop()


async def apply_models(settings: ServeSettings, services: Sequence[Service]) -> None:
    """Serve the models of the config file as it is now; an error is logged, and the present models keep running."""
    try:
        models = settings.models_again()
        for service in services:
            if isinstance(service, ServesModels):
                await service.apply(models)
        log.info("config applied", models=[model.name for model in models])
    except AttnError as error:
        log.error("config not applied", reason=error.message)


def offered_services(cluster: Cluster) -> Sequence[Service]:
    """The services of all plugins; one that cannot be used is logged with its reason.

    Raises `WrongState` if the records have another schema version, which no service could use.
    """
    with Database(database_url(cluster.home)):
        pass
    catalog = attn_core.installed()
    services = [service for _, service in catalog.offers("attn_services", cluster=cluster)]
    for plugin in catalog.plugins:
        if plugin.status not in (PluginStatus.OK, PluginStatus.NOT_SELECTED):
            log.warning("plugin not used", plugin=plugin.full_name, reason=plugin.reason)
    return services


def offered_http_server(settings: GatewaySettings) -> HttpServer | None:
    """The HTTP server of the first plugin that offers one; None if no port is configured for it.

    Raises `MissingPackage` if no plugin offers one.
    """
    if settings.http_port is None:
        return None
    for _, server in attn_core.installed().offers("attn_http_servers"):
        found: HttpServer = server
        return found
    raise MissingPackage.of("attn-openai", "serving HTTP")


def on_signal(number: signal.Signals, call: Callable[[], None]) -> None:
    """Call a function in the running event loop at a signal."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(number, call)
    except NotImplementedError:  # on Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))


class _Signals:
    """Handles SIGINT and SIGTERM: the first signal stops gracefully, the second kills all child processes and exits."""

    def __init__(self, *on_second: Callable[[], None]) -> None:
        self.stopped = asyncio.Event()
        self.received = signal.SIGTERM
        self._on_second = on_second
        self._below: list[psutil.Process] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            on_signal(number, partial(self._hit, number))

    async def unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, and cancel it when a signal arrives."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stopped.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    def _hit(self, number: signal.Signals) -> None:
        below = psutil.Process().children(recursive=True)
        if self.stopped.is_set():
            # Children of a process that ended meanwhile are no longer descendants of this one, and would outlive it.
            killed = list({*self._below, *below})
            for process in killed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(killed, timeout=KILLED_SECONDS)
            for clean_up in self._on_second:
                clean_up()
            os._exit(128 + signal.SIGINT)
        self._below = below
        self.received = number
        self.stopped.set()
