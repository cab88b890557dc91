"""The Python client of attn, sync and asyncio. No torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_client.async_client import AsyncClient as AsyncClient
    from attn_client.client import Client as Client
    from attn_client.results.inference import AttentionMap as AttentionMap
    from attn_client.results.inference import Chunk as Chunk
    from attn_client.results.inference import Completion as Completion
    from attn_client.results.inference import FinishReason as FinishReason
    from attn_client.results.inference import Score as Score
    from attn_client.results.inference import Token as Token
    from attn_client.results.inference import Usage as Usage
    from attn_client.results.models import Mechanism as Mechanism
    from attn_client.results.models import Model as Model
    from attn_client.results.models import ModelState as ModelState
    from attn_client.sampling import Beams as Beams
    from attn_client.sampling import ChatMessage as ChatMessage
    from attn_client.sampling import Grammar as Grammar
    from attn_client.sampling import Sampling as Sampling
    from attn_client.sampling import Sourced as Sourced
    from attn_client.settings import ClientSettings as ClientSettings

# Listing plugins imports this package, and must not import gRPC with it.
_HOMES = {
    "async_client": ("AsyncClient",),
    "client": ("Client",),
    "results.inference": ("AttentionMap", "Chunk", "Completion", "FinishReason", "Score", "Token", "Usage"),
    "results.models": ("Mechanism", "Model", "ModelState"),
    "sampling": ("Beams", "ChatMessage", "Grammar", "Sampling", "Sourced"),
    "settings": ("ClientSettings",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"attn_client.{module}"), name)
    raise AttributeError(f"module 'attn_client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(name for names in _HOMES.values() for name in names)
