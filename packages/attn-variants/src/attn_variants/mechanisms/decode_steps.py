"""Specs of the decode steps of recurrences, from which kernels are chosen; see `attn_core.kernels.recurrent_step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_core.kernels.recurrent_step import RecurrentStepSpec

if TYPE_CHECKING:
    from attn_core import Heads, Rotary


def linear_step(heads: Heads) -> RecurrentStepSpec:
    """Linear attention: positive features, and normalisation by the sum of keys."""
    return RecurrentStepSpec(**sizes(heads), feature_map="elu_plus_one", normalizer=True)


def retention_step(heads: Heads, rotary: Rotary | None, *, fades_apart: bool) -> RecurrentStepSpec:
    """RetNet; with `fades_apart`, as in xPos, each channel has its own decay."""
    return RecurrentStepSpec(
        **sizes(heads),
        rotary="none" if rotary is None else "pairs" if rotary.interleaved else "halves",
        decay="channel" if fades_apart else "head",
        norm_heads=1,
        gate="silu",
    )


def gated_linear_step(heads: Heads) -> RecurrentStepSpec:
    """Gated linear attention."""
    return RecurrentStepSpec(**sizes(heads), decay="channel", decay_form="log_sigmoid", norm_heads=1, gate="silu")


def lightning_step(heads: Heads) -> RecurrentStepSpec:
    """Lightning attention, with one norm over all heads and an output gate."""
    return RecurrentStepSpec(**sizes(heads), feature_map="silu", decay="head", norm_heads=heads.query, gate="sigmoid")


def delta_step(heads: Heads, taps: int) -> RecurrentStepSpec:
    """DeltaNet."""
    return RecurrentStepSpec(**sizes(heads), **delta(taps))


def kimi_delta_step(heads: Heads, taps: int) -> RecurrentStepSpec:
    """Kimi Delta Attention: DeltaNet with a decay per channel and an output gate."""
    return RecurrentStepSpec(**sizes(heads), **delta(taps), decay="channel", decay_form="softplus", gate="sigmoid")


def delta(taps: int) -> dict[str, Any]:
    """The fields that are common to all layers of the delta rule."""
    return {"taps": taps, "feature_map": "silu", "unit": True, "delta_rule": True, "norm_heads": 1}


def sizes(heads: Heads) -> dict[str, Any]:
    """The numbers and sizes of heads."""
    return {
        "num_heads": heads.query,
        "num_key_heads": heads.key_value,
        "key_size": heads.key_size,
        "value_size": heads.value_size,
    }
