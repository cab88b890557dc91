"""The inference and model services of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from attn_engine.client import EngineClient
from attn_gateway import Cluster, Handler, ModelToLoad, handlers_of
from attn_gateway.records import ArtifactStore, Database, ModelRecords, database_url
from attn_gateway.records.database import CALL_SECONDS
from attn_gateway.records.leases import this_process
from attn_schema import DeploymentConfig, EngineConfig, ModelState
from attn_schema.methods import INFERENCE, MODELS, Row

from attn_serve.child_process import ChildProcess
from attn_serve.handlers import InferenceHandlers, ModelHandlers
from attn_serve.placement import EngineProcesses, GpuShares, fits_here
from attn_serve.recorded_models import RecordedModels
from attn_serve.served_models import WantedModel, require_adaptable
from attn_serve.sources import ModelSources

EVERYBODY = ""
"""The tenant of callers without a token, who see only the models available to all tenants."""


class InferenceGrpc:
    """The inference and model services, whose engines run in child processes, or on Ray where that is needed."""

    names: Sequence[str] = (INFERENCE, MODELS)

    def __init__(self, cluster: Cluster, processes: EngineProcesses | None = None) -> None:
        self._processes = processes or EngineProcesses()
        self._cluster = cluster
        self._applied: set[str] = set()
        self._gpus = GpuShares()
        self._database = Database(database_url(cluster.home), patience=CALL_SECONDS)
        self._artifacts = ArtifactStore.from_environment(cluster.home)
        sources = ModelSources(cluster.home, ModelRecords(self._database), self._artifacts)
        self.served = RecordedModels(sources, self._engine, self._database)
        self._address, self._chosen = "", False

    def listens(self, address: str, *, chosen: bool) -> None:
        """Store the address at which the gateway listens; see `attn_gateway.service.KnowsItsAddress`."""
        self._address, self._chosen = address, chosen

    def handlers(self) -> dict[Row, Handler]:
        """The handlers of the calls of both services."""
        inference, models = InferenceHandlers(self.served), ModelHandlers(self.served)
        return handlers_of(INFERENCE, inference) | handlers_of(MODELS, models)

    async def start(self) -> None:
        """Join or start Ray if the settings ask for it, and load the configured models.

        Before that, raises errors for invalid models, and `Unavailable` if the artefact store does not answer.
        """
        if self._artifacts is not None:
            await asyncio.to_thread(self._artifacts.require_reachable)
        wanted, settings = self._wanted(self._cluster.models), self._cluster.settings
        for adapter in settings.adapters if len(wanted) == 1 else ():
            require_adaptable(adapter.name, next(iter(wanted.values())).config)
        await self.served.require_sources(wanted)
        if settings.uses_ray:
            await self._cluster.start()
        configured = {*wanted, *(adapter.name for adapter in settings.adapters)}
        await self.served.join(self._place(), configured)
        await self.served.apply(wanted, ())
        self._applied = set(wanted)
        for adapter in settings.adapters:
            await self.served.load(adapter.name, adapter.source, settings.engine)
        await asyncio.to_thread(self._processes.stop)

    def _place(self) -> str:
        """What this gateway and its successors have in common: their Ray cluster, or else the address, if chosen."""
        if self._cluster.settings.address is not None:
            import ray

            return f"ray/{ray.get_runtime_context().gcs_address}"
        return f"gateway/{this_process().split('/', 1)[0]}/{self._address}" if self._chosen else ""

    async def apply(self, models: Sequence[ModelToLoad]) -> None:
        """Serve these models of a changed config file; see `attn_gateway.service.ServesModels`."""
        wanted = self._wanted(models)
        await self.served.apply(wanted, self._applied)
        self._applied = set(wanted)

    def _wanted(self, models: Sequence[ModelToLoad]) -> dict[str, WantedModel]:
        settings = self._cluster.settings
        return {
            model.name: WantedModel(
                model.source,
                model.engine or settings.engine,
                model.deployment or settings.deployment,
            )
            for model in models
        }

    async def stop(self, shutdown_timeout: float) -> None:
        """Unload all models."""
        await asyncio.to_thread(self._processes.stop)
        await self.served.stop(shutdown_timeout)
        self._database.close()

    def model_serves(self, name: str) -> bool | None:
        """Whether the model of this name that all tenants may use serves; None if unknown. For probes without token."""
        found = [model for model in self.served.models(EVERYBODY) if model.name == name]
        return found[0].info.state is ModelState.SERVING if found else None

    def _engine(self, name: str, folder: Path, config: EngineConfig, deployment: DeploymentConfig) -> EngineClient:
        """Create the client of an engine in a child process, or of a deployment on Ray.

        A deployment is used if Ray is asked for or other gateways may share it, and for several engines, or more ranks
        than this machine has devices.
        """
        # The weights of tenants are always the server's, whoever loads the model.
        settings = self._cluster.settings
        config = config.replace(tenant_weights=settings.engine.tenant_weights)
        if not (settings.uses_ray or deployment.deployed) and fits_here(config):
            return ChildProcess(name, folder, config, self._gpus, self._processes)
        from attn_serve.disaggregation import DisaggregatedReplicas
        from attn_serve.replicas import Replicas

        kind = Replicas if deployment.prefill_replicas is None else DisaggregatedReplicas.of
        return kind(name, folder, config, deployment, settings.replica_tls, start_ray=self._cluster.start)
