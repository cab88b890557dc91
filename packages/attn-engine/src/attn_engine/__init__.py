"""Continuous batching and sampling over any model and any cache, in process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.lazy import lazy_names
from attn_schema import EngineConfig, EngineStats, FinishReason, SamplingParams, ScoringParams, StructuredOutput

if TYPE_CHECKING:
    from attn_engine.build import build_engine as build_engine
    from attn_engine.draft_model import DraftModel as DraftModel
    from attn_engine.engine import Engine as Engine
    from attn_engine.in_process import InProcess as InProcess
    from attn_engine.local_client import LocalClient as LocalClient
    from attn_engine.loop import EngineLoop as EngineLoop
    from attn_engine.request import Request as Request
    from attn_engine.request import RequestOutput as RequestOutput
    from attn_engine.state_transfer import PromptState as PromptState

__all__ = ["EngineConfig", "EngineStats", "FinishReason", "SamplingParams", "ScoringParams", "StructuredOutput"]

# Names are imported lazily: listing plugins imports this package, and must not import torch with it.
lazy_names(
    __name__,
    {
        "build": ("build_engine",),
        "draft_model": ("DraftModel",),
        "engine": ("Engine",),
        "in_process": ("InProcess",),
        "local_client": ("LocalClient",),
        "loop": ("EngineLoop",),
        "state_transfer": ("PromptState",),
        "request": ("Request", "RequestOutput"),
    },
)
