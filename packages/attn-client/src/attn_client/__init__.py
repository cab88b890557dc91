"""The Python client of attn, synchronous and asyncio, with the most used classes of attn-schema. Needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attn_schema import (
    ChatMessage,
    Completion,
    EngineConfig,
    OutputDelta,
    Prompt,
    SamplingParams,
    StructuredOutput,
)

if TYPE_CHECKING:
    from attn_client.async_client import AsyncClient as AsyncClient
    from attn_client.client import Client as Client
    from attn_client.settings import ClientSettings as ClientSettings

__all__ = [
    "ChatMessage",
    "Completion",
    "EngineConfig",
    "OutputDelta",
    "Prompt",
    "SamplingParams",
    "StructuredOutput",
]

# Names are imported lazily: listing plugins imports this package, and must not import gRPC with it.
_HOMES = {
    "async_client": ("AsyncClient",),
    "client": ("Client",),
    "settings": ("ClientSettings",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"attn_client.{module}"), name)
    raise AttributeError(f"module 'attn_client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for names in _HOMES.values() for name in names)])
