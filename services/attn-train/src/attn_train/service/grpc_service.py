"""The service as the gateway wants it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from attn.v1.training_pb2_grpc import add_TrainingServiceServicer_to_server

from attn_train.hosts.protocol import Host
from attn_train.jobs.store import JobStore
from attn_train.layout import Layout
from attn_train.service.dispatcher import Dispatcher
from attn_train.service.servicer import TrainingServicer
from attn_train.settings import TrainSettings
from attn_train.supervisor import SupervisorSettings

if TYPE_CHECKING:
    import grpc.aio
    from attn_gateway import Cluster


class TrainingGrpc:
    """Training jobs as Ray actors of the gateway's cluster, which is started when the first job needs it."""

    names = ("attn.v1.TrainingService",)

    def __init__(self, cluster: Cluster, settings: TrainSettings | None = None) -> None:
        self._cluster = cluster
        self._settings = settings or TrainSettings.from_environment()
        self._store = JobStore(Layout(cluster.home).store)
        self._dispatcher = Dispatcher(self._store, self.make_host, self._settings.jobs_at_once)
        self._servicer = TrainingServicer(cluster.home, self._settings, self._store, self._dispatcher)
        self._tasks: list[asyncio.Task[None]] = []

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the servicer to the server."""
        add_TrainingServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Follow the records; unfinished jobs go on in the background."""
        for work in (self._servicer.changes.follow(), self._dispatcher.run()):
            self._tasks.append(asyncio.create_task(work))

    async def stop(self, shutdown_timeout: float) -> None:
        """Suspend jobs that cannot go on without this server; they go on when it starts again."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._servicer.changes.close()
        await self._dispatcher.stop(shutdown_timeout)
        self._store.close()

    async def make_host(self) -> Host:
        """Supervisors on Ray."""
        await self._cluster.start()
        from attn_train.hosts.ray import RayHost

        private = self._cluster.settings.address is None
        return RayHost(self.supervisor_settings(), private=private)

    def supervisor_settings(self) -> SupervisorSettings:
        """What supervisors are told."""
        return SupervisorSettings(
            home=self._cluster.home, threads=self._settings.threads, silence=self._settings.silence
        )


class InProcessTrainingGrpc(TrainingGrpc):
    """The same without Ray: everything runs in threads of this process."""

    async def make_host(self) -> Host:
        """Supervisors as threads."""
        from attn_train.hosts.thread import ThreadHost

        return ThreadHost(self.supervisor_settings())
