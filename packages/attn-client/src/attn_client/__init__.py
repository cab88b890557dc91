"""The Python client of attn, synchronous and asyncio, with the most used classes of attn-schema. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.lazy import lazy_names
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
lazy_names(
    __name__,
    {
        "async_client": ("AsyncClient",),
        "client": ("Client",),
        "settings": ("ClientSettings",),
    },
)
