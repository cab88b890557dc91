"""Layers whose attention is said by the options of the mechanism `gemma`, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core import AttentionSpec, Causal, Rotary, Window
from attn_core.errors import Incompatible
from attn_core.modifiers import SoftCap
from attn_core.scores import ScaledDot

from attn_models.decoder.attention import LayerAttention

MECHANISM = "gemma"


def gemma_options(attention: LayerAttention, layout: str) -> dict[str, Any]:
    """The options, but for positions, with which `gemma` computes what the layer computes.

    Decided by what the mechanism says it computes, not by its name. Raises `Incompatible` where there are none.
    """
    spec = attention.mechanism.spec(attention.config)
    options = None if spec is None else _options(spec)
    if spec is None or options is None or spec != _said(spec, options):
        name = attention.mechanism.name
        raise Incompatible(f"mechanism {name!r} cannot be said in a {layout} config.json", mechanism=name)
    return options


def turned(attention: LayerAttention) -> Rotary | None:
    """The rotary positions of a layer of the softmax family."""
    spec = attention.mechanism.spec(attention.config)
    return None if spec is None else spec.rotary


def _options(spec: AttentionSpec) -> dict[str, Any] | None:
    if not isinstance(spec.score, ScaledDot) or not isinstance(spec.mask, (Causal, Window)):
        return None
    caps = [modifier.cap for modifier in spec.modifiers if isinstance(modifier, SoftCap)]
    return {
        "norm_eps": spec.norm.eps if spec.norm else None,
        "cap": caps[0] if caps else None,
        "window": spec.mask.left + 1 if isinstance(spec.mask, Window) and spec.mask.left is not None else None,
        "scale": spec.score.scale,
    }


def _said(spec: AttentionSpec, options: Mapping[str, Any]) -> AttentionSpec:
    """What the options say, with the heads and positions of `spec`."""
    window, cap = options["window"], options["cap"]
    return AttentionSpec(
        heads=spec.heads,
        score=ScaledDot(scale=options["scale"]),
        modifiers=() if cap is None else (SoftCap(cap=cap),),
        mask=Causal() if window is None else Window(left=window - 1),
        norm=spec.norm,
        rotary=spec.rotary,
    )
