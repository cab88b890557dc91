"""Continuous batching and sampling over any model and any cache, in process."""

from attn_engine.beams import Beams
from attn_engine.build import build_engine
from attn_engine.draft import Draft
from attn_engine.engine import Engine
from attn_engine.event import Event, Finish, FinishReason, RequestUsage, ScoredToken
from attn_engine.grammar import Grammar
from attn_engine.limits import EngineLimits, Load
from attn_engine.loop import EngineLoop
from attn_engine.request import Request, Scoring
from attn_engine.sampling import Sampling

__all__ = [
    "Beams",
    "Draft",
    "Engine",
    "EngineLimits",
    "EngineLoop",
    "Event",
    "Finish",
    "FinishReason",
    "Grammar",
    "Load",
    "Request",
    "RequestUsage",
    "Sampling",
    "ScoredToken",
    "Scoring",
    "build_engine",
]
