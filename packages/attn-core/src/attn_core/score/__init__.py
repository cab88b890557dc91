"""Scoring functions e = f(q, k), as data."""

from attn_core.score.base import Score
from attn_core.score.location import Location
from attn_core.score.network import Additive, Concat
from attn_core.score.product import Cosine, Dot, General, ScaledDot

__all__ = ["Additive", "Concat", "Cosine", "Dot", "General", "Location", "ScaledDot", "Score"]
