"""The models that are served, by name."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from attn_core.errors import (
    AlreadyExists,
    AttnError,
    Incompatible,
    InvalidValue,
    PermissionDenied,
    Unavailable,
    UnknownName,
    cleaning_up,
)
from attn_engine.client import EngineClient
from attn_models.lora.peft_config import base_of, is_adapter
from attn_schema import DeploymentConfig, EngineConfig, ModelInfo, ModelState

from attn_serve.refusals import RecentRefusals
from attn_serve.sources import ModelSources, engines_bytes, require_memory

log = logging.getLogger(__name__)

EngineMaker = Callable[[str, Path, EngineConfig, DeploymentConfig], EngineClient]
"""Creates the client of an engine, not yet started, for a model's name, folder, engine and deployment config."""
HANDOVER_SECONDS = 60.0
"""How long requests may take to finish in an engine that is replaced by a deployment."""


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ALLOWED_NAMES = "letters, digits, '-', '_' and '.', beginning with a letter or digit, at most 128 characters"


def require_name(name: str, field: str = "name") -> None:
    """Raise `InvalidValue` for an invalid model name."""
    if not NAME.fullmatch(name):
        raise InvalidValue.of(field, name, ALLOWED_NAMES)


def engine_name(owner: str, name: str) -> str:
    """A name for the engine that is unique across the owners of models and adapters."""
    return f"{owner}.{name}" if owner else name


@dataclass(eq=False)
class ServedModel:
    """One model and its engine; `info` describes the model and its state.

    `owner` is the tenant that owns the model, empty if all tenants may use it; an adapter has a `base`, and its engine,
    refusals and `config` are those of its base. `fingerprint` is that of the files that were loaded, empty if another
    gateway did it.
    """

    info: ModelInfo
    engine: EngineClient
    folder: Path
    config: EngineConfig
    deployment: DeploymentConfig
    owner: str = ""
    base: ServedModel | None = None
    fingerprint: str = ""
    refusals: RecentRefusals = field(default_factory=RecentRefusals)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def adapter(self) -> str:
        """The name of the adapter that tasks use in the engine; empty for none."""
        return "" if self.base is None else engine_name(self.owner, self.name)

    async def stop(self, shutdown_timeout: float) -> None:
        """Stop the engine, as `EngineClient.stop`; of an adapter only unload it: requests that run go on."""
        if self.base is None:
            await self.engine.stop(shutdown_timeout)
        else:
            await self.engine.unload_adapter(self.adapter)

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.info.name

    def now(self) -> ModelInfo:
        """The model's info with the current number of engines."""
        serving = self.info.state is ModelState.SERVING
        return self.info.replace(replicas=self.engine.replicas if serving else 0)


def require_serving(model: ServedModel) -> ServedModel:
    """Return the model; raises `Unavailable` if it does not serve now."""
    if model.info.state is not ModelState.SERVING:
        detail = f": {model.info.state_detail}" if model.info.state_detail else ""
        raise Unavailable(f"model {model.name!r} is {model.info.state}{detail}", model=model.name)
    return model


def served_from(name: str, source: str) -> AlreadyExists:
    """The error for loading a model under a name that is in use for a model of another source."""
    return AlreadyExists(f"model {name!r} is already served from {source}", name=name, source=source)


def require_adaptable(adapter: str, config: EngineConfig) -> None:
    """Raise `InvalidValue` if an adapter is loaded on a model that is split over several ranks."""
    ranks = config.tensor_parallel_size
    if ranks > 1:
        raise InvalidValue.of("tensor_parallel_size", ranks, f"1, as the adapter {adapter!r} is loaded on the model")


def rescaled(served: DeploymentConfig, wanted: DeploymentConfig) -> DeploymentConfig:
    """The new deployment config of a model that serves; prefill replicas stay as they are if `wanted` sets none.

    Raises `InvalidValue` if `wanted` adds prefill replicas to a model that was deployed without.
    """
    if wanted.prefill_replicas is None:
        return wanted.replace(prefill_replicas=served.prefill_replicas) if served.prefill_replicas else wanted
    if served.deployed and served.prefill_replicas is None:
        allowed = "none, as the model is served without; unload it first, or load it under a second name with them"
        raise InvalidValue.of("prefill_replicas", wanted.prefill_replicas, allowed)
    return wanted


class WantedModel(NamedTuple):
    """A model as a config file specifies it."""

    source: str
    config: EngineConfig
    deployment: DeploymentConfig


class ServedModels:
    """Loads, finds and unloads models. Used from one event loop.

    A `tenant` finds only its own models and those available to all tenants; None, for admins, finds all models.
    """

    def __init__(self, sources: ModelSources, make: EngineMaker) -> None:
        self._sources = sources
        self._make = make
        self._models: dict[tuple[str, str], ServedModel] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Unloads that another gateway began."""

    def models(self, tenant: str | None = None) -> list[ServedModel]:
        """All models that the tenant may see, sorted by name."""
        found = [model for model in self._models.values() if tenant is None or model.owner in {"", tenant}]
        return sorted(found, key=lambda model: (model.name, model.owner))

    def find(self, name: str, tenant: str | None = None) -> ServedModel:
        """The model of this name; the tenant's own model comes before one that is available to all tenants.

        Raises `UnknownName` with similar names.
        """
        found = self._models.get((tenant or "", name)) or self._models.get(("", name))
        if found is None:
            visible = self.models(tenant)
            found = next((model for model in visible if model.name == name), None)  # another tenant's, for an admin
            if found is None:
                raise UnknownName.of("model", name, {model.name for model in visible})
        return found

    def listed(self, tenant: str | None = None) -> list[ModelInfo]:
        """The infos of all models that the tenant may see, sorted by name."""
        return [model.now() for model in self.models(tenant)]

    async def local_names(self, tenant: str | None = None) -> list[str]:
        """See `ModelSources.names`."""
        return await self._sources.names(tenant)

    def described(self, name: str, tenant: str | None = None) -> ModelInfo:
        """The info of one model; raises as `find`."""
        return self.find(name, tenant).now()

    def serving(self, name: str, tenant: str | None = None) -> ServedModel:
        """The model of this name; raises as `find`, and `Unavailable` if the model does not serve now."""
        return require_serving(self.find(name, tenant))

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
        """Load a model and wait until it serves; loading the same name and source twice gives the same model.

        Raises `AlreadyExists` if the name serves another source, or files that have changed since they were loaded, and
        `Unavailable` while it is being unloaded.

        `tenant` owns the model; without one, all tenants may use it. If the source is an adapter, it is loaded on
        `base_model`, a model that serves; by default the one that the adapter names, or the only one. Raises
        `OutOfCapacity` if the models of the tenant would take more than `max_memory_bytes`; None is no limit.
        """
        require_name(name)
        owner = tenant or ""
        known = self._taken(name, owner)
        if known is None:
            # Other models can be loaded while the files of this one are downloaded.
            folder = await self._sources.find(source or name, tenant)
            fingerprint = await self._sources.fingerprint(folder)
            config = config if is_adapter(folder) else await self._with_draft(config, tenant)
            known = self._taken(name, owner)
            if known is None:
                deployment = deployment or DeploymentConfig()
                wanted = engines_bytes(folder, config, deployment)
                require_memory(wanted, self._taken_bytes(owner), max_memory_bytes)
                making = (deployment, base_model, tenant)
                model = self._made(name, source or name, folder, config.replace(fingerprint=fingerprint), *making)
                model.fingerprint = fingerprint
                await self._start(model)
                return model
        if known.info.source != (source or name):
            raise served_from(name, known.info.source)
        if known.fingerprint and await self._sources.current(source or name, tenant) not in {"", known.fingerprint}:
            raise AlreadyExists(f"the files of {name!r} have changed since it was loaded; unload it first", name=name)
        await known.ready.wait()
        return self.serving(name, known.owner or None)

    async def scale(
        self,
        name: str,
        deployment: DeploymentConfig,
        tenant: str | None = None,
        *,
        max_memory_bytes: float | None = None,
    ) -> ServedModel:
        """Change how many engines serve a model; returns when they do. Running requests are not interrupted.

        Raises `PermissionDenied` if the tenant does not own the model, and `OutOfCapacity` as `load`.
        """
        self.serving(name, tenant)
        model = self._changeable(name, tenant, "scaling")
        if not deployment.deployed:
            raise InvalidValue.of("replicas", None, "a number, or max_replicas")
        if model.base is not None:
            raise InvalidValue.of("name", name, f"{model.base.name!r}, the model that the adapter is loaded on")
        deployment = rescaled(model.deployment, deployment)
        wanted = engines_bytes(model.folder, model.config, deployment)
        require_memory(wanted, self._taken_bytes(model.owner, name), max_memory_bytes)
        if model.engine.scalable:
            await model.engine.scale(deployment)
        else:
            # A single engine in a process of its own is replaced by a deployment.
            engine = self._make(engine_name(model.owner, name), model.folder, model.config, deployment)
            self._follow(model, engine)
            try:
                await engine.start()
                for adapter in self._adapters_of(model):
                    await engine.load_adapter(adapter.adapter, adapter.folder)
            except BaseException:
                with cleaning_up("the deployment that did not start"):
                    await asyncio.shield(engine.stop(0))
                raise
            former, model.engine = model.engine, engine
            for adapter in self._adapters_of(model):
                adapter.engine = engine
            await former.stop(HANDOVER_SECONDS)
        model.deployment = deployment
        return model

    async def switch(
        self, name: str, change: Callable[[EngineClient], Awaitable[None]], state: ModelState | None = None
    ) -> ServedModel:
        """Let a model's engine sleep, wake up or take other weights, and set its `state` after that.

        Raises `Unavailable` for a model that neither serves nor sleeps, or sleeps and is to get weights, and
        `Incompatible` while adapters are loaded on it, which were made for its weights.
        """
        model = self.find(name)
        if model.info.state is not ModelState.SLEEPING or state is None:
            require_serving(model)
        if model.base is not None or self._adapters_of(model):
            raise Incompatible(f"adapters are loaded on {name!r}, or it is one: unload them first", name=name)
        await change(model.engine)
        if state is not None:
            model.info = model.info.replace(state=state)
        return model

    async def apply(self, wanted: Mapping[str, WantedModel], former: Collection[str]) -> None:
        """Serve the models `wanted` to all tenants: load or scale them, and unload those of `former` not among them.

        Raises `InvalidValue` or `UnknownName` for invalid models before anything is changed. The source and engine
        config of a serving model cannot be changed: unload it first, or use another name.
        """
        await self.require_sources(wanted)
        changed = [name for name, one in wanted.items() if await self._is_rescaled(name, one)]
        gone = [name for name in former if name not in wanted and ("", name) in self._models]
        for name in gone:
            await self.unload(name, HANDOVER_SECONDS)
        for name in changed:
            await self.scale(name, wanted[name].deployment)
        new = [(name, one) for name, one in wanted.items() if ("", name) not in self._models]
        await asyncio.gather(*(self.load(name, one.source, one.config, deployment=one.deployment) for name, one in new))

    async def require_sources(self, wanted: Mapping[str, WantedModel]) -> None:
        """Raise for invalid names, sources and tensor parallelism in a config file, and for prefill replicas of a model
        whose states cannot be moved."""
        for name, one in wanted.items():
            require_name(name, "models")
            folder = await self._sources.find(one.source)
            if one.config.tensor_parallel_size > 1:
                from attn_engine.host.ranks import require_tensor_parallel

                await asyncio.to_thread(require_tensor_parallel, folder, one.config)
            if one.deployment.prefill_replicas is not None:
                from attn_serve.disaggregation import require_movable

                await asyncio.to_thread(require_movable, folder, one.config)

    async def _is_rescaled(self, name: str, one: WantedModel) -> bool:
        """Whether a config file changes a served model's number of engines; raises for changes that need an unload."""
        known = self._models.get(("", name))
        if known is None:
            return False
        config = await self._with_draft(one.config, None)
        if (known.info.source, known.config.replace(fingerprint="")) != (one.source, config):
            allowed = "those that it is served with; unload it first, or use a second name"
            raise InvalidValue.of(f"models.{name}", "another source or engine", allowed)
        if known.deployment != one.deployment and not one.deployment.deployed:
            allowed = "replicas or max_replicas, as the model is served by a deployment"
            raise InvalidValue.of(f"models.{name}.deployment", None, allowed)
        served = known.deployment.prefill_replicas
        if served is not None and one.deployment.prefill_replicas is None:
            allowed = f"a number, now {served}; for none, unload the model first, or use a second name"
            raise InvalidValue.of(f"models.{name}.deployment.prefill_replicas", None, allowed)
        rescaled(known.deployment, one.deployment)
        return known.deployment != one.deployment

    async def unload(self, name: str, shutdown_timeout: float, tenant: str | None = None) -> None:
        """Take a model out of service; running requests have `shutdown_timeout` seconds to finish.

        Raises `PermissionDenied` if the tenant does not own the model.
        """
        await self._unload(self._changeable(name, tenant, "unloading"), shutdown_timeout)

    async def _unload(self, model: ServedModel, shutdown_timeout: float) -> None:
        for adapter in self._adapters_of(model):
            del self._models[adapter.owner, adapter.name]
        await self._end(model, model.stop(shutdown_timeout))

    def _changeable(self, name: str, tenant: str | None, what: str) -> ServedModel:
        """The model of this name; raises `PermissionDenied` unless the tenant owns it or is None."""
        model = self.find(name, tenant)
        if tenant is not None and model.owner != tenant:
            raise PermissionDenied(f"model {name!r} is shared by all tenants; {what} it is for admins", name=name)
        return model

    def _adapters_of(self, model: ServedModel) -> list[ServedModel]:
        return [other for other in self._models.values() if other.base is model]

    async def _end(self, model: ServedModel, ending: Awaitable[None]) -> None:
        model.info = model.info.replace(state=ModelState.DRAINING)
        await ending
        if self._models.get((model.owner, model.name)) is model:
            del self._models[model.owner, model.name]

    async def stop(self, shutdown_timeout: float) -> None:
        """Unload all models, but keep the engines that other gateways use."""
        models = [model for model in self.models() if model.base is None]
        ends = [self._end(model, model.engine.release(shutdown_timeout)) for model in models]
        await asyncio.gather(*ends, return_exceptions=True)

    def owned(self, owner: str) -> set[str]:
        """The names of the models that a tenant owns, without those that failed."""
        return {name for (each, name) in self._models if each == owner and self._taken(name, owner)}

    def _taken_bytes(self, owner: str, but: str = "") -> int:
        """The memory of the models of an owner, without the one named `but`."""
        models = [model for (whose, name), model in self._models.items() if whose == owner and name != but]
        return sum(engines_bytes(model.folder, model.config, model.deployment) for model in models)

    def _taken(self, name: str, owner: str) -> ServedModel | None:
        """The model under a name, of this owner or available to all tenants, unless it has failed."""
        found = self._models.get((owner, name)) or self._models.get(("", name))
        return None if found is None or found.info.state is ModelState.FAILED else found

    def _made(
        self,
        name: str,
        source: str,
        folder: Path,
        config: EngineConfig,
        deployment: DeploymentConfig,
        base_model: str,
        tenant: str | None,
    ) -> ServedModel:
        """Create and register a model that is about to be loaded."""
        owner, now = tenant or "", datetime.now(UTC)
        if is_adapter(folder):
            base = self._base_of(folder, base_model, tenant)
            require_adaptable(name, base.config)
            info = base.info.replace(
                name=name, source=source, base_model=base.name, state=ModelState.LOADING, load_time=now
            )
            require_serving(base)
            model = ServedModel(info, base.engine, folder, base.config, base.deployment, owner, base)
            model.refusals = base.refusals  # of one engine
        else:
            if base_model:
                raise InvalidValue.of("base_model", base_model, "none, as the source is not an adapter")
            info = ModelInfo(name=name, source=source, state=ModelState.LOADING, load_time=now)
            engine = self._make(engine_name(owner, name), folder, config, deployment)
            model = ServedModel(info, engine, folder, config, deployment, owner)
        self._models[owner, name] = model
        return model

    async def _start_adapter(self, model: ServedModel, base: ServedModel, folder: Path) -> None:
        try:
            await base.engine.load_adapter(model.adapter, folder)
            model.engine = base.engine  # which may have been replaced meanwhile
            model.info = model.info.replace(state=ModelState.SERVING)
        except BaseException:
            del self._models[model.owner, model.name]
            raise
        finally:
            model.ready.set()

    async def _with_draft(self, config: EngineConfig, tenant: str | None) -> EngineConfig:
        """The config with its draft model, if any, replaced by the folder of that model."""
        if config.draft_model is None:
            return config
        draft = await self._sources.find(config.draft_model, tenant)
        return config.replace(draft_model=str(draft))

    def _base_of(self, folder: Path, given: str, tenant: str | None) -> ServedModel:
        """The loaded model to which an adapter applies; raises `InvalidValue` if that is ambiguous."""
        models = {model.name: model for model in self.models(tenant) if model.base is None}
        if given:
            if given not in models:
                raise UnknownName.of("model", given, models)
            return models[given]
        named = base_of(folder)
        found = [model for model in models.values() if named in (model.name, model.info.source)]
        found = found or list(models.values())
        if len(found) != 1:
            allowed = f"the name of a loaded model: {', '.join(models) or 'none is loaded'}"
            raise InvalidValue.of("base_model", named or None, allowed)
        return found[0]

    async def _start(self, model: ServedModel) -> None:
        if model.base is not None:
            await self._start_adapter(model, model.base, model.folder)
            return
        self._follow(model, model.engine)
        try:
            known = {name: getattr(model.info, name) for name in ("name", "source", "load_time")}
            model.info = (await model.engine.start()).replace(state=ModelState.SERVING, **known)
            if model.info.note:
                log.warning("model %s: %s", model.name, model.info.note)
        except BaseException as error:
            detail = error.message if isinstance(error, AttnError) else type(error).__name__
            model.info = model.info.replace(state=ModelState.FAILED, state_detail=detail)
            del self._models[model.owner, model.name]
            with cleaning_up("the engine that did not start"):
                await asyncio.shield(model.engine.stop(0))
            raise
        finally:
            model.ready.set()

    def _follow(self, model: ServedModel, engine: EngineClient) -> None:
        """Mark the model as failed, or unload it, when its engine ends by itself or by another gateway."""
        engine.on_failure = partial(self._mark_failed, model)
        engine.on_unloaded = partial(self._unload_with_others, model)

    def _unload_with_others(self, model: ServedModel) -> None:
        log.info("model %s was unloaded at another gateway", model.name)
        task = asyncio.create_task(self._unload(model, HANDOVER_SECONDS), name=f"the end of {model.name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _mark_failed(self, model: ServedModel, detail: str) -> None:
        """Mark a model whose engine cannot be started again, and its adapters; the name can be loaded again."""
        for one in (model, *self._adapters_of(model)):
            one.info = one.info.replace(state=ModelState.FAILED, state_detail=detail)
