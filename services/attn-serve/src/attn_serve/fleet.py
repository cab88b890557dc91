"""The models that are served, by name."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from attn_core.errors import AlreadyExists, AttnError, InvalidValue, Unavailable, UnknownName
from attn_host import find_folder
from attn_models.lora.files import base_of, is_adapter
from attn_schema import EngineConfig, ModelInfo, ModelState

from attn_serve.engine_client import EngineClient

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

EngineMaker = Callable[[str, Path, EngineConfig], EngineClient]
"""Makes an engine, not yet started, for the model of this name in this folder."""


@dataclass(eq=False)
class ServedModel:
    """One model and its engine; `info` says what it is and where it is in its life."""

    info: ModelInfo
    engine: EngineClient
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The name that requests use."""
        return self.info.name


class Fleet:
    """Loads, finds and unloads models. Used from one event loop."""

    def __init__(self, home: Path, make: EngineMaker) -> None:
        self._home = home
        self._make = make
        self._models: dict[str, ServedModel] = {}

    def models(self) -> list[ServedModel]:
        """All models by name."""
        return [self._models[name] for name in sorted(self._models)]

    def find(self, name: str) -> ServedModel:
        """The model of this name; raises `UnknownName` with near names."""
        if name not in self._models:
            raise UnknownName.of("model", name, self._models)
        return self._models[name]

    def engine(self, name: str) -> EngineClient:
        """The engine of a model that serves; raises `UnknownName`, or `Unavailable` where it does not serve now."""
        model = self.find(name)
        if model.info.state is not ModelState.SERVING:
            detail = f": {model.info.state_detail}" if model.info.state_detail else ""
            raise Unavailable(f"model {name!r} is {model.info.state}{detail}", model=name)
        return model.engine

    async def load(self, name: str, source: str, config: EngineConfig, base_model: str = "") -> ServedModel:
        """Load a model and wait until it serves; the same name and source twice is one model.

        A source that is an adapter is loaded on `base_model`, a model that serves; if not given, the one that the
        adapter names, or the only one.
        """
        if not NAME.fullmatch(name):
            allowed = "letters, digits, '-', '_' and '.', beginning with a letter or digit, at most 128 characters"
            raise InvalidValue.of("name", name, allowed)
        known = self._models.get(name)
        if known and known.info.state is not ModelState.FAILED:
            served = known.info.source
            if served != (source or name):
                raise AlreadyExists(f"model {name!r} is served from {served}", name=name, source=served)
            await known.ready.wait()
            return self.find(name)
        folder = find_folder(source or name, self._home)
        if is_adapter(folder):
            return await self._load_adapter(name, source or name, folder, base_model)
        if base_model:
            raise InvalidValue.of("base_model", base_model, "none, as the source is no adapter")
        if config.draft_model is not None:
            config = config.replace(draft_model=str(find_folder(config.draft_model, self._home)))
        info = ModelInfo(name=name, source=source or name, state=ModelState.LOADING, load_time=datetime.now(UTC))
        model = ServedModel(info=info, engine=self._make(name, folder, config))
        self._models[name] = model
        await self._start(model)
        return model

    async def unload(self, name: str, shutdown_timeout: float) -> None:
        """Take a model out of service; running requests have `shutdown_timeout` seconds to finish."""
        model = self.find(name)
        for adapter in [other for other in self._models.values() if other.info.base_model == name]:
            del self._models[adapter.name]
        model.info = model.info.replace(state=ModelState.DRAINING)
        await model.engine.stop(shutdown_timeout)
        if self._models.get(name) is model:
            del self._models[name]

    async def stop(self, shutdown_timeout: float) -> None:
        """Unload everything."""
        names = [model.name for model in self.models()]
        await asyncio.gather(*(self.unload(name, shutdown_timeout) for name in names), return_exceptions=True)

    async def _load_adapter(self, name: str, source: str, folder: Path, base_model: str) -> ServedModel:
        base = self._base_of(folder, base_model)
        client = self.engine(base.name)
        info = base.info.replace(
            name=name, source=source, base_model=base.name, state=ModelState.LOADING, load_time=datetime.now(UTC)
        )
        model = ServedModel(info=info, engine=client)
        self._models[name] = model
        try:
            model.engine = await client.load_adapter(name, folder)
            model.info = info.replace(state=ModelState.SERVING)
        except BaseException:
            del self._models[name]
            raise
        finally:
            model.ready.set()
        return model

    def _base_of(self, folder: Path, given: str) -> ServedModel:
        """The loaded model that an adapter is for; raises `InvalidValue` where that is not clear."""
        models = {model.name: model for model in self.models() if not model.info.base_model}
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
        try:
            known = {name: getattr(model.info, name) for name in ("name", "source", "load_time")}
            model.info = (await model.engine.start()).replace(state=ModelState.SERVING, **known)
            if model.info.note:
                log.warning("model %s: %s", model.name, model.info.note)
        except BaseException as error:
            detail = error.message if isinstance(error, AttnError) else type(error).__name__
            model.info = model.info.replace(state=ModelState.FAILED, state_detail=detail)
            del self._models[model.name]
            await asyncio.shield(model.engine.stop(0))
            raise
        finally:
            model.ready.set()
