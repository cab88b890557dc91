"""The models that are served, by name."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from attn_core.errors import AlreadyExists, AttnError, InvalidValue, Unavailable, UnknownName

from attn_serve.answers import ModelInfo
from attn_serve.engines.client import EngineClient
from attn_serve.requests import EngineSettings
from attn_serve.source import find_folder

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

EngineMaker = Callable[[str, Path, EngineSettings], EngineClient]
"""Makes an engine, not yet started, for the model of this name in this folder."""


class ServedState(StrEnum):
    """Where a model is in its life."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(eq=False)
class ServedModel:
    """One model and its engine."""

    name: str
    source: str
    engine: EngineClient
    state: ServedState = ServedState.LOADING
    detail: str = ""
    info: ModelInfo | None = None
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    ready: asyncio.Event = field(default_factory=asyncio.Event)


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
        if model.state is not ServedState.SERVING:
            detail = f": {model.detail}" if model.detail else ""
            raise Unavailable(f"model {name!r} is {model.state}{detail}", model=name)
        return model.engine

    async def load(self, name: str, source: str, settings: EngineSettings) -> ServedModel:
        """Load a model and wait until it serves; the same name and source twice is one model."""
        if not NAME.fullmatch(name):
            allowed = "letters, digits, '-', '_' and '.', beginning with a letter or digit, at most 128 characters"
            raise InvalidValue.of("name", name, allowed)
        known = self._models.get(name)
        if known and known.state is not ServedState.FAILED:
            if known.source != (source or name):
                raise AlreadyExists(f"model {name!r} is served from {known.source}", name=name, source=known.source)
            await known.ready.wait()
            return self.find(name)
        folder = find_folder(source or name, self._home)
        if settings.draft is not None:
            settings = dataclasses.replace(settings, draft=str(find_folder(settings.draft, self._home)))
        model = ServedModel(name=name, source=source or name, engine=self._make(name, folder, settings))
        self._models[name] = model
        await self._start(model)
        return model

    async def unload(self, name: str, grace: float) -> None:
        """Take a model out of service; running requests have `grace` seconds to finish."""
        model = self.find(name)
        model.state = ServedState.DRAINING
        await model.engine.stop(grace)
        if self._models.get(name) is model:
            del self._models[name]

    async def stop(self, grace: float) -> None:
        """Unload everything."""
        names = [model.name for model in self.models()]
        await asyncio.gather(*(self.unload(name, grace) for name in names), return_exceptions=True)

    async def _start(self, model: ServedModel) -> None:
        try:
            model.info = await model.engine.start()
            model.state = ServedState.SERVING
            if model.info.note:
                log.warning("model %s: %s", model.name, model.info.note)
        except BaseException as error:
            model.detail = error.message if isinstance(error, AttnError) else type(error).__name__
            model.state = ServedState.FAILED
            del self._models[model.name]
            await asyncio.shield(model.engine.stop(0))
            raise
        finally:
            model.ready.set()
