"""The models that are served, by name."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from attn_core.errors import AlreadyExists, AttnError, InvalidValue, PermissionDenied, Unavailable, UnknownName
from attn_models.lora.files import base_of, is_adapter
from attn_schema import DeploymentConfig, EngineConfig, ModelInfo, ModelState

from attn_serve.engine_client import EngineClient
from attn_serve.sources import ModelSources

log = logging.getLogger(__name__)

ALLOWED_NAMES = "letters, digits, '-', '_' and '.', beginning with a letter or digit, at most 128 characters"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

EngineMaker = Callable[[str, Path, EngineConfig, DeploymentConfig], EngineClient]
"""Makes what serves the model of this name in this folder, not yet started."""
HANDOVER_SECONDS = 60.0
"""How long requests may take to finish in an engine that gives way to a deployment."""


def engine_name(owner: str, name: str) -> str:
    """A name for the engine that no model or adapter of another owner has."""
    return f"{owner}.{name}" if owner else name


class WantedModel(NamedTuple):
    """A model as a config file asks for it."""

    source: str
    config: EngineConfig
    deployment: DeploymentConfig


@dataclass(eq=False)
class ServedModel:
    """One model and its engine; `info` says what it is and where it is in its life.

    `owner` is the tenant that it belongs to, empty for everybody's; an adapter has a `base`, and the base's `config`.
    """

    info: ModelInfo
    engine: EngineClient
    folder: Path
    config: EngineConfig
    deployment: DeploymentConfig
    owner: str = ""
    base: ServedModel | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.info.name

    def now(self) -> ModelInfo:
        """What it is, with the number of engines that answer now."""
        serving = self.info.state is ModelState.SERVING
        return self.info.replace(replicas=self.engine.replicas if serving else 0)


class Fleet:
    """Loads, finds and unloads models. Used from one event loop.

    A `tenant` finds its own models and everybody's, and to it there are no others; None finds all.
    """

    def __init__(self, sources: ModelSources, make: EngineMaker) -> None:
        self._sources = sources
        self._make = make
        self._models: dict[tuple[str, str], ServedModel] = {}
        self._loading = asyncio.Lock()

    def models(self, tenant: str | None = None) -> list[ServedModel]:
        """All models by name."""
        found = [model for model in self._models.values() if tenant is None or model.owner in {"", tenant}]
        return sorted(found, key=lambda model: (model.name, model.owner))

    def find(self, name: str, tenant: str | None = None) -> ServedModel:
        """The model of this name, the tenant's own before everybody's; raises `UnknownName` with near names."""
        seen = self.models(tenant)
        found = [model for model in seen if model.name == name]
        if not found:
            raise UnknownName.of("model", name, {model.name for model in seen})
        return next((model for model in found if model.owner == (tenant or "")), found[0])

    def engine(self, name: str, tenant: str | None = None) -> EngineClient:
        """The engine of a model that serves; raises `UnknownName`, or `Unavailable` where it does not serve now."""
        model = self.find(name, tenant)
        if model.info.state is not ModelState.SERVING:
            detail = f": {model.info.state_detail}" if model.info.state_detail else ""
            raise Unavailable(f"model {name!r} is {model.info.state}{detail}", model=name)
        return model.engine

    async def load(
        self,
        name: str,
        source: str,
        config: EngineConfig,
        base_model: str = "",
        *,
        deployment: DeploymentConfig | None = None,
        tenant: str | None = None,
    ) -> ServedModel:
        """Load a model and wait until it serves; the same name and source twice is one model.

        It belongs to `tenant`, or to everybody without one. A source that is an adapter is loaded on `base_model`, a
        model that serves; if not given, the one that the adapter names, or the only one.
        """
        if not NAME.fullmatch(name):
            raise InvalidValue.of("name", name, ALLOWED_NAMES)
        owner = tenant or ""
        async with self._loading:
            known = self._models.get((owner, name)) or self._models.get(("", name))
            if known is None or known.info.state is ModelState.FAILED:
                making = (deployment or DeploymentConfig(), base_model, tenant)
                model, known = await self._made(name, source or name, config, *making), None
            else:
                model = known
        if known is None:
            await self._start(model)
            return model
        if known.info.source != (source or name):
            served = known.info.source
            raise AlreadyExists(f"model {name!r} is served from {served}", name=name, source=served)
        await known.ready.wait()
        return self.find(name, known.owner or None)

    async def scale(self, name: str, deployment: DeploymentConfig, tenant: str | None = None) -> ServedModel:
        """Change how many engines serve a model; returns when they do. Requests that run go on without a break.

        Raises `PermissionDenied` where a tenant asks for everybody's.
        """
        self.engine(name, tenant)
        model = self._changeable(name, tenant, "scaling")
        if not deployment.deployed:
            raise InvalidValue.of("replicas", None, "a number, or max_replicas")
        if model.base is not None:
            raise InvalidValue.of("name", name, f"{model.base.name!r}, the model that the adapter is loaded on")
        if not await model.engine.scale(deployment):
            # One engine in an actor of its own gives way to a deployment.
            engine = self._make(engine_name(model.owner, name), model.folder, model.config, deployment)
            try:
                await engine.start()
                for adapter in self._adapters_of(model):
                    named = engine_name(adapter.owner, adapter.name)
                    adapter.engine = await engine.load_adapter(named, adapter.folder)
            except BaseException:
                await asyncio.shield(engine.stop(0))
                raise
            former, model.engine = model.engine, engine
            await former.stop(HANDOVER_SECONDS)
        model.deployment = deployment
        return model

    async def apply(self, wanted: Mapping[str, WantedModel], former: Collection[str]) -> None:
        """Serve everybody these models: load, scale, and unload those of `former` that are not among them.

        Raises `InvalidValue` or `UnknownName` for one that cannot be, before anything is changed. How a model that
        serves is computed is not changed under its requests: it is unloaded first, or another name is given.
        """
        changed = []
        for name, one in wanted.items():
            if not NAME.fullmatch(name):
                raise InvalidValue.of("models", name, ALLOWED_NAMES)
            await asyncio.to_thread(self._sources.folder, one.source, None)
            known = self._models.get(("", name))
            if known is None:
                continue
            config = await self._with_draft(one.config, None)
            if (known.info.source, known.config) != (one.source, config):
                allowed = "those that it is served with, until it is unloaded; or a model of another name"
                raise InvalidValue.of(f"models.{name}", "another source or engine", allowed)
            if known.deployment != one.deployment:
                if not one.deployment.deployed:
                    allowed = "replicas or max_replicas, as the model has become a deployment"
                    raise InvalidValue.of(f"models.{name}.deployment", None, allowed)
                changed.append(name)
        for name in set(former) - set(wanted):
            if ("", name) in self._models:
                await self.unload(name, HANDOVER_SECONDS)
        for name in changed:
            await self.scale(name, wanted[name].deployment)
        new = [(name, one) for name, one in wanted.items() if ("", name) not in self._models]
        await asyncio.gather(*(self.load(name, one.source, one.config, deployment=one.deployment) for name, one in new))

    async def unload(self, name: str, shutdown_timeout: float, tenant: str | None = None) -> None:
        """Take a model out of service; running requests have `shutdown_timeout` seconds to finish.

        Raises `PermissionDenied` where a tenant asks to unload everybody's.
        """
        model = self._changeable(name, tenant, "unloading")
        for adapter in self._adapters_of(model):
            del self._models[adapter.owner, adapter.name]
        await self._end(model, model.engine.stop(shutdown_timeout))

    def _changeable(self, name: str, tenant: str | None, what: str) -> ServedModel:
        """The model of this name, if the tenant may change it."""
        model = self.find(name, tenant)
        if tenant is not None and model.owner != tenant:
            raise PermissionDenied(f"model {name!r} is everybody's; {what} it is for admins", name=name)
        return model

    def _adapters_of(self, model: ServedModel) -> list[ServedModel]:
        return [other for other in self._models.values() if other.base is model]

    async def _end(self, model: ServedModel, ending: Awaitable[None]) -> None:
        model.info = model.info.replace(state=ModelState.DRAINING)
        await ending
        if self._models.get((model.owner, model.name)) is model:
            del self._models[model.owner, model.name]

    async def stop(self, shutdown_timeout: float) -> None:
        """Unload everything, but what other gateways use."""
        models = [model for model in self.models() if model.base is None]
        ends = [self._end(model, model.engine.release(shutdown_timeout)) for model in models]
        await asyncio.gather(*ends, return_exceptions=True)

    async def _made(
        self,
        name: str,
        source: str,
        config: EngineConfig,
        deployment: DeploymentConfig,
        base_model: str,
        tenant: str | None,
    ) -> ServedModel:
        """A model that is about to be loaded."""
        folder = await asyncio.to_thread(self._sources.folder, source, tenant)
        owner, now = tenant or "", datetime.now(UTC)
        if is_adapter(folder):
            base = self._base_of(folder, base_model, tenant)
            info = base.info.replace(
                name=name, source=source, base_model=base.name, state=ModelState.LOADING, load_time=now
            )
            self.engine(base.name, tenant)  # raises where the base does not serve
            model = ServedModel(info, base.engine, folder, base.config, base.deployment, owner, base)
        else:
            if base_model:
                raise InvalidValue.of("base_model", base_model, "none, as the source is no adapter")
            config = await self._with_draft(config, tenant)
            info = ModelInfo(name=name, source=source, state=ModelState.LOADING, load_time=now)
            engine = self._make(engine_name(owner, name), folder, config, deployment)
            model = ServedModel(info, engine, folder, config, deployment, owner)
        self._models[owner, name] = model
        return model

    async def _start_adapter(self, model: ServedModel, base: ServedModel, folder: Path) -> None:
        try:
            model.engine = await base.engine.load_adapter(engine_name(model.owner, model.name), folder)
            model.info = model.info.replace(state=ModelState.SERVING)
        except BaseException:
            del self._models[model.owner, model.name]
            raise
        finally:
            model.ready.set()

    async def _with_draft(self, config: EngineConfig, tenant: str | None) -> EngineConfig:
        """The config with the folder of its draft model, if it names one."""
        if config.draft_model is None:
            return config
        draft = await asyncio.to_thread(self._sources.folder, config.draft_model, tenant)
        return config.replace(draft_model=str(draft))

    def _base_of(self, folder: Path, given: str, tenant: str | None) -> ServedModel:
        """The loaded model that an adapter is for; raises `InvalidValue` where that is not clear."""
        models = {model.name: model for model in self.models(tenant) if model.base is None}
        if given:
            if given not in models:
                raise UnknownName.of("model", given, models)
            return models[given]
        named = base_of(folder)
        found = [model for model in models.values() if named in (model.name, model.info.source)]
        found = found or list(models.values())
        if len(found) != 1:
            said = f"the name of one that is loaded: {', '.join(models) or 'there is none'}"
            raise InvalidValue.of("base_model", named or None, said)
        return found[0]

    async def _start(self, model: ServedModel) -> None:
        if model.base is not None:
            await self._start_adapter(model, model.base, model.folder)
            return
        try:
            known = {name: getattr(model.info, name) for name in ("name", "source", "load_time")}
            model.info = (await model.engine.start()).replace(state=ModelState.SERVING, **known)
            if model.info.note:
                log.warning("model %s: %s", model.name, model.info.note)
        except BaseException as error:
            detail = error.message if isinstance(error, AttnError) else type(error).__name__
            model.info = model.info.replace(state=ModelState.FAILED, state_detail=detail)
            del self._models[model.owner, model.name]
            await asyncio.shield(model.engine.stop(0))
            raise
        finally:
            model.ready.set()
