"""The models that are served, by name."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from attn_core.errors import AlreadyExists, AttnError, InvalidValue, PermissionDenied, Unavailable, UnknownName
from attn_models.lora.files import base_of, is_adapter
from attn_schema import EngineConfig, ModelInfo, ModelState

from attn_serve.engine_client import EngineClient
from attn_serve.sources import ModelSources

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

EngineMaker = Callable[[str, Path, EngineConfig], EngineClient]
"""Makes an engine, not yet started, for the model of this name in this folder."""


@dataclass(eq=False)
class ServedModel:
    """One model and its engine; `info` says what it is and where it is in its life.

    `owner` is the tenant that it belongs to, empty for everybody's; an adapter has a `base` and a `folder`.
    """

    info: ModelInfo
    engine: EngineClient
    owner: str = ""
    base: ServedModel | None = None
    folder: Path | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.info.name


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
        self, name: str, source: str, config: EngineConfig, base_model: str = "", *, tenant: str | None = None
    ) -> ServedModel:
        """Load a model and wait until it serves; the same name and source twice is one model.

        It belongs to `tenant`, or to everybody without one. A source that is an adapter is loaded on `base_model`, a
        model that serves; if not given, the one that the adapter names, or the only one.
        """
        if not NAME.fullmatch(name):
            allowed = "letters, digits, '-', '_' and '.', beginning with a letter or digit, at most 128 characters"
            raise InvalidValue.of("name", name, allowed)
        owner = tenant or ""
        async with self._loading:
            known = self._models.get((owner, name)) or self._models.get(("", name))
            if known is None or known.info.state is ModelState.FAILED:
                model, known = await self._made(name, source or name, config, base_model, tenant), None
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

    async def unload(self, name: str, shutdown_timeout: float, tenant: str | None = None) -> None:
        """Take a model out of service; running requests have `shutdown_timeout` seconds to finish.

        Raises `PermissionDenied` where a tenant asks to unload everybody's.
        """
        model = self.find(name, tenant)
        if tenant is not None and model.owner != tenant:
            raise PermissionDenied(f"model {name!r} is everybody's; unloading it is for admins", name=name)
        await self._unload(model, shutdown_timeout)

    async def _unload(self, model: ServedModel, shutdown_timeout: float) -> None:
        for adapter in [other for other in self._models.values() if other.base is model]:
            del self._models[adapter.owner, adapter.name]
        model.info = model.info.replace(state=ModelState.DRAINING)
        await model.engine.stop(shutdown_timeout)
        if self._models.get((model.owner, model.name)) is model:
            del self._models[model.owner, model.name]

    async def stop(self, shutdown_timeout: float) -> None:
        """Unload everything."""
        models = self.models()
        await asyncio.gather(*(self._unload(model, shutdown_timeout) for model in models), return_exceptions=True)

    async def _made(
        self, name: str, source: str, config: EngineConfig, base_model: str, tenant: str | None
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
            model = ServedModel(info=info, engine=base.engine, owner=owner, base=base, folder=folder)
        else:
            if base_model:
                raise InvalidValue.of("base_model", base_model, "none, as the source is no adapter")
            if config.draft_model is not None:
                draft = await asyncio.to_thread(self._sources.folder, config.draft_model, tenant)
                config = config.replace(draft_model=str(draft))
            info = ModelInfo(name=name, source=source, state=ModelState.LOADING, load_time=now)
            model = ServedModel(info=info, engine=self._make(name, folder, config), owner=owner)
        self._models[owner, name] = model
        return model

    async def _start_adapter(self, model: ServedModel, base: ServedModel, folder: Path) -> None:
        # Adapters of one engine have names of their own, whoever they belong to.
        engine_name = f"{model.owner}/{model.name}" if model.owner else model.name
        try:
            model.engine = await base.engine.load_adapter(engine_name, folder)
            model.info = model.info.replace(state=ModelState.SERVING)
        except BaseException:
            del self._models[model.owner, model.name]
            raise
        finally:
            model.ready.set()

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
        if model.base is not None and model.folder is not None:
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
