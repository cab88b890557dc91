"""The real server with the model of scripted.py and an encoder, for the clients and for what they have sent."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import scripted
from attn_gateway import GatewaySettings, serving
from attn_gateway.catalog import CatalogService
from attn_openai.server import UvicornServer
from attn_schema import EngineConfig

MODELS = Path(__file__).parents[2] / "services" / "attn-openai" / "tests" / "conftest.py"
spec = importlib.util.spec_from_file_location("small_served_models", MODELS)
small: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
spec.loader.exec_module(small)  # type: ignore[union-attr]


class Scripted(small.LocalInference):
    """The inference and model services with these two models."""

    async def start(self) -> None:
        """Load the models."""
        for name in ("scripted", "tiny-bert"):
            await self.served.load(name, "", EngineConfig(num_threads=1))


@asynccontextmanager
async def served(home: Path) -> AsyncIterator[str]:
    """The URL of the server, which has its models in `home`."""
    scripted.save_scripted(home / "models" / "scripted")
    small.save_encoder(home / "models" / "tiny-bert")
    settings = GatewaySettings(port=0, http_port=0)
    async with serving([Scripted(home), CatalogService()], settings, http=UvicornServer()) as gateway:
        yield f"http://{gateway.http.address}" if gateway.http else ""
