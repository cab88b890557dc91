"""Engines behind one protocol: in this process, or in a Ray actor."""

from attn_serve.engines.client import EngineClient
from attn_serve.engines.in_process import InProcessEngine
from attn_serve.engines.ray_actor import RayEngine

__all__ = ["EngineClient", "InProcessEngine", "RayEngine"]
