"""The models of a gateway that shares its records with other gateways: all of them list the same models.

Gateways of one place (one Ray cluster) share the engines too: when one loads, scales or unloads a model, or sets its
traffic shares, the others follow; a name that several load at the same time is loaded once. A gateway with engines of
its own lists the models of other gateways, with their address. See docs/decisions/0013-gateways-share-records.md and
0021-loaded-models-outlive-a-server.md.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
from attn_core.errors import AttnError, PermissionDenied, Unavailable, UnknownName, cleaning_up
from attn_gateway.records import Database, GatewayRecord, GatewayRecords, ServedState
from attn_gateway.records import ServedModel as Record
from attn_gateway.records.gateways import HEARTBEAT_SECONDS, World
from attn_schema import DeploymentConfig, EngineConfig, ModelInfo, ModelState

from attn_serve.fleet import HANDOVER_SECONDS, EngineMaker, Fleet, require_name, served_from
from attn_serve.other_models import Key, OtherModels, ServedElsewhere
from attn_serve.served_model import ServedModel
from attn_serve.sources import ModelSources
from attn_serve.versions import base_name

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval at which a gateway checks the records for changes by other gateways."""
CLAIM_POLL_SECONDS = 0.2
"""Interval at which a gateway that waits for another gateway to load a model checks whether it is loaded."""
RETRY_SECONDS = 30.0
"""Delay before another attempt to serve a model that another gateway of the place serves and this one could not."""


def to_json(noun: msgspec.Struct) -> str:
    """A struct as JSON; equal structs give equal text."""
    return msgspec.json.encode(noun, order="deterministic").decode()


def engine_of(record: Record) -> EngineConfig:
    """The engine config with which a model was loaded."""
    return EngineConfig.from_mapping(json.loads(record.engine))


def deployment_of(record: Record) -> DeploymentConfig:
    """The deployment config of a recorded model."""
    return DeploymentConfig.from_mapping(json.loads(record.deployment))


class SharedFleet(Fleet):
    """A fleet whose models are recorded. Call `join` before the first model is loaded, and `stop` at the end."""

    def __init__(self, sources: ModelSources, make: EngineMaker, database: Database) -> None:
        super().__init__(sources, make)
        self._records = GatewayRecords(database)
        self._database = database
        self._gateway: GatewayRecord | None = None
        self._shared = False
        self._configured: frozenset[str] = frozenset()
        self._world = World({}, ())
        self._seen_version: object = None
        self._last_heartbeat = 0.0
        self._claims: dict[Key, Record] = {}
        """The records of the models that this gateway serves, as last written or read."""
        self._changing: dict[Key, asyncio.Lock] = {}
        self._refused: dict[Key, tuple[int, float, str]] = {}
        """The models of the place that this gateway failed to serve: generation, time of the attempt, and reason."""
        self._reading = asyncio.Lock()
        self._tasks: dict[Key, asyncio.Task[Any]] = {}
        self._follower: asyncio.Task[None] | None = None

    async def join(self, gateway: GatewayRecord, configured: Collection[str] = (), *, shared: bool) -> None:
        """Register this gateway and serve the models of its place; `configured` are the models named by options.

        If the engines are not `shared`, the models that calls had loaded at a former gateway of the same place are
        loaded again, however it ended, except those being loaded when it died, which may be why it died.
        """
        self._gateway, self._shared, self._configured = gateway, shared, frozenset(configured)
        await self._database.write(self._records.join, gateway, shared=shared)
        self._last_heartbeat = time.monotonic()
        await self._read_records()
        left = [record for record in self._world.models if record.place == gateway.place]
        self._follower = asyncio.create_task(self._follow(), name="other gateways")
        if shared:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self._read_records()  # adapters are loaded after their base models
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        else:
            await self._serve_again(left)

    def listed(self, tenant: str | None = None) -> list[ModelInfo]:
        """The infos of all models that this gateway or another one serves, sorted by name."""
        found = [(model.owner, model.now()) for model in self.models(tenant)]
        found += self._elsewhere.infos(tenant) if self._gateway else []
        return [info for _, info in sorted(found, key=lambda one: (one[1].name, one[0]))]

    def described(self, name: str, tenant: str | None = None) -> ModelInfo:
        """The info of one model of `listed`; raises `UnknownName`."""
        try:
            return super().described(name, tenant)
        except (ServedElsewhere, Unavailable):
            return self._elsewhere.named(name, tenant)[0]

    def versions(self, name: str, tenant: str | None = None) -> list[ServedModel]:
        """See `Fleet.versions`; raises `ServedElsewhere` for a model that only other gateways serve, `Unavailable` for
        one whose gateway is gone or that another gateway is loading."""
        try:
            return super().versions(name, tenant)
        except UnknownName:
            if self._gateway:
                self._elsewhere.require_none(name, tenant)
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
        traffic: float | None = None,
    ) -> ServedModel:
        """See `Fleet.load`; if several gateways of a place load a name at once, one loads it and all serve it."""
        require_name(name)
        owner = tenant or ""
        given = {"deployment": deployment, "tenant": tenant, "traffic": traffic}
        async with self._locked((owner, name)):
            if any((whose, name) in self._models for whose in (owner, "")):
                return await super().load(name, source, config, base_model, **given)  # type: ignore[arg-type]
            wanted = Record(
                place=self._me.place,
                owner=owner,
                name=name,
                gateway=self._me.id,
                state=ServedState.LOADING,
                source=source or name,
                base=base_model,
                engine=to_json(config),
                deployment=to_json(deployment or DeploymentConfig()),
                configured=not owner and name in self._configured,
            )
            record, mine = await self._claimed(wanted)
            if not mine:
                return await self._attach(record)
            try:
                model = await super().load(name, source, config, base_model, **given)  # type: ignore[arg-type]
            except BaseException:
                # The name is free again after a failed load.
                with cleaning_up("the record of a model that was not loaded"):
                    await asyncio.shield(self._database.write(self._records.remove, [record]))
                raise
            self._claims[record.key] = record
        try:
            await self.publish()
        except Unavailable as error:
            log.warning("model %s is served, but could not be recorded yet: %s", name, error.message)
        return model

    async def replace_others(self, name: str, tenant: str | None = None) -> None:
        """See `Fleet.replace_others`; applies to all gateways of the place."""
        await super().replace_others(name, tenant)
        await self.publish()

    async def scale(self, name: str, deployment: DeploymentConfig, tenant: str | None = None) -> ServedModel:
        """See `Fleet.scale`; applies to all gateways of the place."""
        model = await super().scale(name, deployment, tenant)
        await self.publish()
        return model

    async def unload(self, name: str, shutdown_timeout: float, tenant: str | None = None) -> None:
        """See `Fleet.unload`; applies to all gateways of the place. Any gateway can unload the models of a gone one."""
        try:
            await super().unload(name, shutdown_timeout, tenant)
        except Unavailable:
            left = self._elsewhere.left(name, tenant)
            if not left:
                raise
            if tenant is not None and any(record.owner != tenant for record in left):
                raise PermissionDenied(
                    f"model {name!r} is shared by all tenants; unloading it is for admins", name=name
                ) from None
            await self._database.write(self._records.remove, left)
            await self._read_records()

    async def apply(self, wanted: Mapping[str, Any], former: Collection[str]) -> None:
        """See `Fleet.apply`."""
        self._configured = frozenset(wanted)
        await super().apply(wanted, former)
        await self.publish()

    def unserved(self, names: Collection[str]) -> set[str]:
        """Those of `names` that this gateway does not serve to all tenants, with all versions of the same models."""
        lacking = {base_name(name) for name in names if ("", name) not in self._models}
        return {name for name in names if base_name(name) in lacking}

    async def publish(self) -> None:
        """Record changes of this gateway's models: state, traffic shares and deployment config."""
        changes = []
        for key, record in self._claims.items():
            model = self._models.get(key)
            values = {} if model is None else changed_of(model, record)
            if values:
                changes.append((record, values))
        if changes:
            for record in await self._database.write(self._records.write, changes):
                self._claims[record.key] = record

    async def stop(self, shutdown_timeout: float) -> None:
        """Unload all models, keep the engines that other gateways of the place use, and unregister this gateway."""
        running = [task for task in (self._follower, *self._tasks.values()) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with suppress(AttnError):
            await self.publish()
        await super().stop(shutdown_timeout)
        if self._gateway is not None:
            with suppress(AttnError):
                await self._database.write(self._records.leave, self._gateway, shared=self._shared)

    @property
    def _me(self) -> GatewayRecord:
        if self._gateway is None:
            raise Unavailable("the server is still starting")
        return self._gateway

    @asynccontextmanager
    async def _locked(self, key: Key) -> AsyncIterator[None]:
        """Lock a model while it is loaded or unloaded: other calls wait, and `_keep_up` ignores its record."""
        async with self._changing.setdefault(key, asyncio.Lock()):
            yield

    async def _claimed(self, wanted: Record) -> tuple[Record, bool]:
        """Claim a name: returns the record and True if this gateway shall load the model.

        Returns the record and False if another gateway serves the model by now. Raises `AlreadyExists` if the name is
        in use for another source.
        """
        while True:
            record, mine = await self._database.write(self._records.claim, wanted, shared=self._shared)
            if mine or (record.state is ServedState.SERVING and record.source == wanted.source):
                return record, mine
            if record.source != wanted.source:
                raise served_from(wanted.name, record.source)
            await asyncio.sleep(CLAIM_POLL_SECONDS)

    async def _attach(self, record: Record) -> ServedModel:
        """Serve a model that another gateway of the place has loaded."""
        model = await super().load(
            record.name,
            record.source,
            engine_of(record),
            record.base,
            deployment=deployment_of(record),
            tenant=record.owner or None,
        )
        self._follow_record(model, record)
        # The traffic shares are those recorded, not those that a newly loaded version would get.
        for key, claim in self._claims.items():
            if key[0] == record.owner and key in self._models and base_name(key[1]) == base_name(record.name):
                other = self._models[key]
                other.info = other.info.replace(traffic=claim.traffic)
        return model

    async def _unload(self, model: ServedModel, shutdown_timeout: float) -> None:
        if model.info.state is ModelState.LOADING:
            await super()._unload(model, shutdown_timeout)  # this makes its load fail, which frees the name
            return
        async with self._locked((model.owner, model.name)):
            gone = [one for one in (model, *self._adapters_of(model)) if (one.owner, one.name) in self._claims]
            draining = [(self._claims[one.owner, one.name], {"state": ServedState.DRAINING}) for one in gone]
            # The other gateways refuse new requests before the engines stop.
            written = await self._database.write(self._records.write, draining) if draining else []
            for record in written:
                self._claims.pop(record.key, None)
            await super()._unload(model, shutdown_timeout)
            ended = [(record, {"state": ServedState.UNLOADED, "gateway": self._me.id}) for record in written]
            if self._shared:
                await self._database.write(self._records.write, ended)
            else:
                await self._database.write(self._records.remove, written)
        await self.publish()

    async def _follow(self) -> None:
        """Periodically write this gateway's heartbeat, and follow changes by other gateways."""
        away = False
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                if time.monotonic() - self._last_heartbeat >= HEARTBEAT_SECONDS:
                    await self._database.write(self._records.beat, self._me)
                    self._last_heartbeat = time.monotonic()
                version = await self._database.read(self._database.version)
                if version != self._seen_version or self._refused:
                    await self._read_records()
                    self._seen_version = version
                if away:
                    log.warning("the records of other gateways can be read again")
                away = False
            except AttnError as error:
                if not away:
                    log.warning("the records of other gateways cannot be read: %s", error.message)
                away = True
            except Exception:
                log.exception("the records of other gateways could not be followed; trying again")

    async def _read_records(self) -> None:
        """Read the records of all gateways, and follow those of this gateway's place."""
        async with self._reading:
            await self.publish()
            # Claims that change here while the records are read are newer than the records.
            before = dict(self._claims)
            self._world = await self._database.read(self._records.world)
            here = {record.key: record for record in self._world.models if record.place == self._me.place}
            for key, record in before.items():
                if key not in here and self._claims.get(key) is record:
                    await self._database.write(self._records.restore, record)
            if self._shared:
                for key, record in here.items():
                    if self._claims.get(key) is before.get(key):
                        self._keep_up(key, record)

    def _keep_up(self, key: Key, record: Record) -> None:
        """Make one model follow its record, unless this gateway is changing the model."""
        model, claim = self._models.get(key), self._claims.get(key)
        if self._is_busy(key, record):
            return
        if model is not None and claim is not None and claim.generation < record.generation:
            self._begin(key, self._detach(model))
        elif record.state is ServedState.LOADING and self._world.is_gone(record.gateway):
            self._begin(key, self._load_for(record))
        elif record.state is ServedState.DRAINING and self._world.is_gone(record.gateway):
            self._begin(key, self._finish_unloading(record))
        elif model is None:
            self._keep_up_without(key, record)
        elif claim is not None:
            self._keep_up_with(model, claim, record)

    def _is_busy(self, key: Key, record: Record) -> bool:
        """Whether a call to this gateway is changing the model, or a change of its record is being followed."""
        if key in self._tasks:
            if record.state is ServedState.UNLOADED and key not in self._claims:
                self._tasks[key].cancel()  # the model that it waits for has been unloaded
            return True
        lock = self._changing.get(key)
        return lock is not None and lock.locked()

    def _keep_up_without(self, key: Key, record: Record) -> None:
        if record.state is ServedState.UNLOADED:
            self._refused.pop(key, None)
        elif record.state is ServedState.SERVING:
            generation, since, _ = self._refused.get(key, (0, 0.0, ""))
            due = generation != record.generation or time.monotonic() - since > RETRY_SECONDS
            if due and (not record.base or any((owner, record.base) in self._claims for owner in (record.owner, ""))):
                self._begin(key, self._serve_too(record))

    def _keep_up_with(self, model: ServedModel, claim: Record, record: Record) -> None:
        if record.state is ServedState.UNLOADED:
            self._begin(claim.key, self._detach(model))
        elif record.state is ServedState.DRAINING:
            model.info = model.info.replace(state=ModelState.DRAINING)
        elif not changed_of(model, claim):
            self._follow_record(model, record)

    def _begin(self, key: Key, work: Any) -> None:
        task = asyncio.create_task(self._logging_errors(key, work), name=f"{key[1]} as other gateways do")
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _logging_errors(self, key: Key, work: Any) -> None:
        try:
            await work
        except AttnError as error:
            log.warning("model %s, which other gateways serve, could not be followed: %s", key[1], error.message)
        except Exception:
            log.exception("model %s, which other gateways serve, could not be followed", key[1])

    async def _serve_too(self, record: Record) -> None:
        try:
            async with self._locked(record.key):
                if record.key not in self._models:
                    await self._attach(record)
            self._refused.pop(record.key, None)
        except Exception as error:
            detail = error.message if isinstance(error, AttnError) else type(error).__name__
            self._refused[record.key] = (record.generation, time.monotonic(), detail)
            raise

    async def _load_for(self, record: Record) -> None:
        """Load a model again that a gateway which is gone was loading or serving."""
        making = {"deployment": deployment_of(record), "tenant": record.owner or None}
        await self.load(record.name, record.source, engine_of(record), record.base, **making)  # type: ignore[arg-type]

    async def _finish_unloading(self, record: Record) -> None:
        """Complete the unloading of a model that a gateway which is gone had started."""
        model = self._models.get(record.key)
        if model is not None:
            await self._unload(model, HANDOVER_SECONDS)
        else:
            await self._database.write(self._records.write, [(record, {"state": ServedState.UNLOADED})])

    async def _detach(self, model: ServedModel) -> None:
        """Stop serving a model, and its adapters, that another gateway has unloaded."""
        for one in (*self._adapters_of(model), model):
            self._claims.pop((one.owner, one.name), None)
            await self._end(one, one.leave(HANDOVER_SECONDS))

    async def _serve_again(self, left: Sequence[Record]) -> None:
        """Load the models that a former gateway served at its end; failures are logged and stay recorded."""
        named = {("", name) for name in self._configured}
        called = [record for record in left if not record.configured and record.key not in named]
        kept = [record for record in called if record.state is ServedState.SERVING]
        begun = [record for record in called if record.state is ServedState.LOADING]
        forgotten = [record for record in left if record not in kept and record not in begun]
        await self._database.write(self._records.remove, forgotten)
        died = "its gateway died while it was being loaded; load it again"
        failures = [(record, died) for record in begun]
        for record in sorted(kept, key=lambda one: bool(one.base)):
            try:
                await self._load_for(record)
            except AttnError as error:
                failures.append((replace(record, generation=record.generation + 1), error.message))
                log.warning("model %s was served before, but could not be loaded again: %s", record.name, error.message)
        for record, detail in failures:
            failed = replace(record, state=ServedState.FAILED, detail=detail, gateway=self._me.id)
            await self._database.write(self._records.remove, [record])
            await self._database.write(self._records.restore, failed)
        for record in kept:
            if (model := self._models.get(record.key)) is not None:
                model.info = model.info.replace(traffic=record.traffic)
        await self.publish()
        await self._read_records()

    def _follow_record(self, model: ServedModel, record: Record) -> None:
        self._claims[record.key] = record
        if model.base is None and record.deployment != to_json(model.deployment):
            model.deployment = deployment_of(record)
            model.engine.adopt(model.deployment)
        model.info = model.info.replace(traffic=record.traffic)

    @property
    def _elsewhere(self) -> OtherModels:
        """The recorded models that this gateway does not serve."""
        refused = {key: why for key, (_, _, why) in self._refused.items()}
        return OtherModels(self._world, self._me, self._shared, self._models.keys(), refused)


def changed_of(model: ServedModel, record: Record) -> dict[str, Any]:
    """The fields of a record whose values differ from the model's current state, with the new values."""
    values: dict[str, Any] = {}
    if record.state is ServedState.LOADING and model.info.state is ModelState.SERVING:
        base = "" if model.base is None else model.base.name
        values |= {"state": ServedState.SERVING, "base": base, "info": to_json(model.info)}
    if model.info.traffic != record.traffic:
        values["traffic"] = model.info.traffic
    if model.base is None and to_json(model.deployment) != record.deployment:
        values["deployment"] = to_json(model.deployment)
    return values
