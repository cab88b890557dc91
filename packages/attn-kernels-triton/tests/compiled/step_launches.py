"""Launches of decode steps of linear recurrences as layers would cause them, over tensors that are never touched."""

from __future__ import annotations

import torch
from attn_core.batch import SlotsInPlace
from attn_core.kernels.recurrent_step import (
    ConvolutionInputs,
    DecayInputs,
    OutputInputs,
    RecurrentStepInputs,
    RecurrentStepSpec,
)
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.recurrence.step import step_launches
from attn_kernels_triton.recurrence.step_checks import check_step

REQUESTS, SLOTS, HEADS = 8, 9, 16
SIZES = {"num_heads": HEADS, "num_key_heads": HEADS, "key_size": 128, "value_size": 128}
SPECS: dict[str, RecurrentStepSpec] = {
    "linear": RecurrentStepSpec(**SIZES, feature_map="elu_plus_one", normalizer=True),
    "retnet": RecurrentStepSpec(
        **{**SIZES, "value_size": 256}, rotary="pairs", decay="head", norm_heads=1, gate="silu"
    ),
    "lightning": RecurrentStepSpec(**SIZES, feature_map="silu", decay="head", norm_heads=HEADS, gate="sigmoid"),
    "gla": RecurrentStepSpec(
        **{**SIZES, "key_size": 64}, decay="channel", decay_form="log_sigmoid", norm_heads=1, gate="silu"
    ),
    "deltanet": RecurrentStepSpec(**SIZES, taps=4, feature_map="silu", unit=True, delta_rule=True, norm_heads=1),
    "kda": RecurrentStepSpec(
        **SIZES,
        taps=4,
        feature_map="silu",
        unit=True,
        decay="channel",
        decay_form="softplus",
        delta_rule=True,
        norm_heads=1,
        gate="sigmoid",
    ),
    "gated_deltanet": RecurrentStepSpec(
        **{**SIZES, "num_key_heads": HEADS // 2},
        taps=4,
        feature_map="silu",
        unit=True,
        decay="head",
        decay_form="softplus",
        delta_rule=True,
        norm_heads=1,
        gate="silu",
    ),
    "mamba2": RecurrentStepSpec(
        **{**SIZES, "num_key_heads": 1},
        taps=4,
        feature_map="silu",
        decay="head",
        decay_form="softplus",
        step_size=True,
        skip=True,
        norm_heads=HEADS,
        gate="silu",
        norm_before_gate=False,
    ),
}
"""What layers ask for, over heads of 128."""


def step_inputs(spec: RecurrentStepSpec, dtype: torch.dtype = torch.bfloat16) -> RecurrentStepInputs:
    """The tensors of a step of some requests, rows and weights of this type."""

    def rows(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind)

    heads, into = (spec.num_heads, spec.value_size), (spec.num_key_heads, spec.key_size)
    fading = spec.key_size if spec.decay == "channel" else 1
    state = {"S": rows(SLOTS, spec.num_heads, spec.key_size, spec.columns, kind=torch.float32)}
    convolution = decay = None
    if spec.taps:
        state["tail"] = rows(SLOTS, spec.taps - 1, spec.channels)
        bias = rows(spec.channels) if spec.step_size else None
        width = spec.num_key_heads * spec.key_size
        convolution = ConvolutionInputs(rows(spec.channels, spec.taps), bias, (0, width, 2 * width))
    if spec.decay_form == "softplus":
        decay = DecayInputs(rows(REQUESTS, spec.num_heads, fading), rows(spec.num_heads), rows(spec.num_heads, fading))
    elif spec.decay != "none":
        given = 1 if spec.decay_form == "log" else REQUESTS
        decay = DecayInputs(rows(given, spec.num_heads, fading), temperature=16.0)
    angles = rows(REQUESTS, 1, spec.key_size, kind=torch.float32)
    return RecurrentStepInputs(
        spec=spec,
        query=rows(REQUESTS, *into),
        key=rows(REQUESTS, *into),
        value=rows(REQUESTS, *heads),
        state=SlotsInPlace(state, torch.zeros(REQUESTS, dtype=torch.int64)),
        scales=(spec.key_size**-0.5, 1.0),
        convolution=convolution,
        cos_sin=None if spec.rotary == "none" else (angles, angles),
        decay=decay,
        strength=rows(REQUESTS, spec.num_heads) if spec.delta_rule else None,
        output=OutputInputs(
            skip=rows(spec.num_heads) if spec.skip else None,
            norm=rows(spec.value_size * max(1, spec.norm_heads)) if spec.norm_heads else None,
            eps=1e-5,
            gate=rows(REQUESTS, *heads) if spec.gate != "none" else None,
            normalizer_eps=1e-6,
        ),
    )


def recurrent_step_launches(spec: RecurrentStepSpec, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The programs of a step, in order."""
    inputs = step_inputs(spec, dtype)
    check_step(inputs)
    return step_launches(inputs, torch.empty(REQUESTS, spec.num_heads * spec.value_size, dtype=dtype))
