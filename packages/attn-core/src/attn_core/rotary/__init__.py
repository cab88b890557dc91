"""Rotary positions, as data: no tensor is made here."""

from attn_core.rotary.scaling import DynamicNtk, LinearScaling, Llama3Scaling, LongRope, RotaryScaling
from attn_core.rotary.turning import Rotary
from attn_core.rotary.words import rotary_scaling
from attn_core.rotary.yarn import Yarn

__all__ = [
    "DynamicNtk",
    "LinearScaling",
    "Llama3Scaling",
    "LongRope",
    "Rotary",
    "RotaryScaling",
    "Yarn",
    "rotary_scaling",
]
