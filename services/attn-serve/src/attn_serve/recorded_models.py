"""Served models that outlive the server: what calls have loaded is recorded, and loaded again at the next start.

See docs/decisions/0021-loaded-models-outlive-a-server.md and 0023-gateways-do-not-follow-one-another.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from attn_core.errors import AttnError, PermissionDenied, Unavailable, UnknownName, cleaning_up
from attn_gateway.records import Database, LoadedModel, LoadedModels
from attn_schema import DeploymentConfig, EngineConfig, ModelInfo, ModelState

from attn_serve.served_models import EngineMaker, ServedModel, ServedModels, require_name
from attn_serve.sources import ModelSources

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Owner and name of a model."""


def to_json(noun: msgspec.Struct) -> str:
    """A struct as JSON; equal structs give equal text."""
    return msgspec.json.encode(noun, order="deterministic").decode()


class RecordedModels(ServedModels):
    """Served models that are recorded. Call `join` before the first model is loaded, and `stop` at the end."""

    def __init__(self, sources: ModelSources, make: EngineMaker, database: Database) -> None:
        super().__init__(sources, make)
        self._database = database
        self._records = LoadedModels(database)
        self._place = ""
        self._configured: frozenset[str] = frozenset()
        self._recorded: dict[Key, LoadedModel] = {}
        """The records of the models that are served, as last written."""
        self._failed: dict[Key, ModelInfo] = {}
        """The recorded models that could not be loaded again."""
        self._loading: dict[Key, asyncio.Lock] = {}

    async def join(self, place: str, configured: Collection[str] = ()) -> None:
        """Load the models again that are recorded at this place; an empty one has no records.

        Not those named in `configured`, by options or a config file, which are loaded as these say, nor what was being
        loaded when a server died, which may be why it died.
        """
        self._place, self._configured = place, frozenset(configured)
        left = await self._database.read(self._records.at, place) if place else []
        for record in sorted(left, key=lambda one: bool(one.base)):  # adapters after their base models
            if record.key in {("", name) for name in configured}:
                await self._database.write(self._records.remove, record)
            elif record.serving:
                await self._load_again(record)
            else:
                self._fail(record, "the server died while it was being loaded; load it again")
        await self.publish()

    def listed(self, tenant: str | None = None) -> list[ModelInfo]:
        """See `ServedModels.listed`; with the models that could not be loaded again."""
        found = [(model.name, model.owner, model.now()) for model in self.models(tenant)]
        found += [(name, owner, info) for (owner, name), info in self._failures(tenant).items()]
        return [info for *_, info in sorted(found, key=lambda one: one[:2])]

    def described(self, name: str, tenant: str | None = None) -> ModelInfo:
        """The info of one model of `listed`; raises `UnknownName`."""
        with suppress(Unavailable):
            return super().described(name, tenant)
        return next(info for (_, each), info in self._failures(tenant).items() if each == name)

    def find(self, name: str, tenant: str | None = None) -> ServedModel:
        """See `ServedModels.find`; raises `Unavailable` for a model that could not be loaded again."""
        try:
            return super().find(name, tenant)
        except UnknownName:
            for (_, each), info in self._failures(tenant).items():
                if each == name:
                    text = f"model {name!r} is {info.state}: {info.state_detail}"
                    raise Unavailable(text, model=name) from None
            raise

    async def load(
        self,
        name: str,
        source: str,
        config: EngineConfig,
        base_model: str = "",
        *,
        deployment: DeploymentConfig | None = None,
        tenant: str | None = None,
        max_memory_bytes: float | None = None,
    ) -> ServedModel:
        """See `ServedModels.load`; the model is recorded, unless options name it."""
        require_name(name)
        record = LoadedModel(
            place=self._place,
            owner=tenant or "",
            name=name,
            source=source or name,
            base=base_model,
            engine=to_json(config),
            deployment=to_json(deployment or DeploymentConfig()),
        )
        given: dict[str, Any] = {"deployment": deployment, "tenant": tenant, "max_memory_bytes": max_memory_bytes}
        async with self._loading.setdefault(record.key, asyncio.Lock()):
            named = not record.owner and name in self._configured
            if not self._place or named or self._taken(name, record.owner) is not None:
                return await super().load(name, source, config, base_model, **given)
            await self._database.write(self._records.put, record)
            try:
                model = await super().load(name, source, config, base_model, **given)
            except BaseException:
                with cleaning_up("the record of a model that was not loaded"):
                    await asyncio.shield(self._database.write(self._records.remove, record))
                raise
            self._recorded[record.key] = record
            self._failed.pop(record.key, None)
        try:
            await self.publish()
        except Unavailable as error:
            log.warning("model %s is served, but could not be recorded yet: %s", name, error.message)
        return model

    async def scale(
        self,
        name: str,
        deployment: DeploymentConfig,
        tenant: str | None = None,
        *,
        max_memory_bytes: float | None = None,
    ) -> ServedModel:
        """See `ServedModels.scale`."""
        model = await super().scale(name, deployment, tenant, max_memory_bytes=max_memory_bytes)
        await self.publish()
        return model

    async def unload(self, name: str, shutdown_timeout: float, tenant: str | None = None) -> None:
        """See `ServedModels.unload`; also for a model that could not be loaded again."""
        try:
            await super().unload(name, shutdown_timeout, tenant)
        except Unavailable:
            failed = [(owner, each) for owner, each in self._failures(tenant) if each == name]
            if not failed:
                raise
            if tenant is not None and any(owner != tenant for owner, _ in failed):
                text = f"model {name!r} is shared by all tenants; unloading it is for admins"
                raise PermissionDenied(text, name=name) from None
            for owner, each in failed:
                record = LoadedModel(place=self._place, owner=owner, name=each, source="")
                await self._database.write(self._records.remove, record)
                del self._failed[owner, each]

    async def apply(self, wanted: Mapping[str, Any], former: Collection[str]) -> None:
        """See `ServedModels.apply`."""
        self._configured = frozenset(wanted)
        await super().apply(wanted, former)
        await self.publish()

    async def publish(self) -> None:
        """Record changes of models: that they serve, and their deployment configs."""
        for key, record in list(self._recorded.items()):
            model = self._models.get(key)
            if model is None or model.info.state is ModelState.DRAINING:
                continue
            base = record.base if model.base is None else model.base.name
            deployment = record.deployment if model.base else to_json(model.deployment)
            now = replace(record, base=base, deployment=deployment, serving=True)
            if now != record:
                await self._database.write(self._records.put, now)
                self._recorded[key] = now

    async def stop(self, shutdown_timeout: float) -> None:
        """Unload all models, and keep their records and the engines that other gateways of a cluster use."""
        with suppress(AttnError):
            await self.publish()
        await super().stop(shutdown_timeout)

    async def _unload(self, model: ServedModel, shutdown_timeout: float) -> None:
        for one in (model, *self._adapters_of(model)):
            record = self._recorded.get((one.owner, one.name))
            if record is not None:
                await self._database.write(self._records.remove, record)
                del self._recorded[record.key]
        await super()._unload(model, shutdown_timeout)
        await self.publish()

    async def _load_again(self, record: LoadedModel) -> None:
        engine = EngineConfig.from_mapping(json.loads(record.engine))
        deployment = DeploymentConfig.from_mapping(json.loads(record.deployment))
        await self._database.write(self._records.put, replace(record, serving=False))
        making = {"deployment": deployment, "tenant": record.owner or None}
        try:
            await super().load(record.name, record.source, engine, record.base, **making)  # type: ignore[arg-type]
        except AttnError as error:
            log.warning("model %s was served before, but could not be loaded again: %s", record.name, error.message)
            self._fail(record, error.message)
        else:
            self._recorded[record.key] = record
        await self._database.write(self._records.put, record)

    def _fail(self, record: LoadedModel, detail: str) -> None:
        self._failed[record.key] = ModelInfo(
            name=record.name,
            source=record.source,
            base_model=record.base,
            state=ModelState.FAILED,
            state_detail=detail,
            load_time=datetime.now(UTC),
        )

    def _failures(self, tenant: str | None) -> dict[Key, ModelInfo]:
        """The failed models that the tenant may see, and that have not been loaded since."""
        return {
            (owner, name): info
            for (owner, name), info in self._failed.items()
            if (tenant is None or owner in {"", tenant}) and self._taken(name, owner) is None
        }
