"""One served model: what it is, its engine, and its state."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path

from attn_core.errors import InvalidValue, Unavailable
from attn_engine.client import EngineClient
from attn_schema import DeploymentConfig, EngineConfig, ModelInfo, ModelState

from attn_serve.refusals import RecentRefusals

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
