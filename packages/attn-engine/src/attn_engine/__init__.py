"""Continuous batching and sampling over any model and any cache, in process."""

from attn_schema import EngineConfig, EngineStats, FinishReason, SamplingParams, ScoringParams, StructuredOutput

from attn_engine.build import build_engine
from attn_engine.draft_model import DraftModel
from attn_engine.engine import Engine
from attn_engine.loop import EngineLoop
from attn_engine.moved_prompts import PromptState
from attn_engine.request import PromptEmbeddings, Request, RequestOutput

__all__ = [
    "DraftModel",
    "Engine",
    "EngineConfig",
    "EngineLoop",
    "EngineStats",
    "FinishReason",
    "PromptEmbeddings",
    "PromptState",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ScoringParams",
    "StructuredOutput",
    "build_engine",
]
