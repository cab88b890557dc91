"""Continuous batching and sampling over any model and any cache, in process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attn_schema import EngineConfig, EngineStats, FinishReason, SamplingParams, ScoringParams, StructuredOutput

if TYPE_CHECKING:
    from attn_engine.build import build_engine as build_engine
    from attn_engine.draft_model import DraftModel as DraftModel
    from attn_engine.engine import Engine as Engine
    from attn_engine.host.local_client import LocalClient as LocalClient
    from attn_engine.loop import EngineLoop as EngineLoop
    from attn_engine.moved_prompts import PromptState as PromptState
    from attn_engine.request import PromptEmbeddings as PromptEmbeddings
    from attn_engine.request import Request as Request
    from attn_engine.request import RequestOutput as RequestOutput

__all__ = ["EngineConfig", "EngineStats", "FinishReason", "SamplingParams", "ScoringParams", "StructuredOutput"]

# Names are imported lazily: listing plugins imports this package, and must not import torch with it.
_HOMES = {
    "build": ("build_engine",),
    "draft_model": ("DraftModel",),
    "engine": ("Engine",),
    "host.local_client": ("LocalClient",),
    "loop": ("EngineLoop",),
    "moved_prompts": ("PromptState",),
    "request": ("PromptEmbeddings", "Request", "RequestOutput"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"attn_engine.{module}"), name)
    raise AttributeError(f"module 'attn_engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for names in _HOMES.values() for name in names)])
