"""Decode steps of linear recurrences as `RecurrentStepSpec` says them, head by head, and tensors to try them with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from attn_core.batch import SlotsInPlace
from attn_core.kernels.recurrent_step import (
    ConvolutionInputs,
    DecayInputs,
    OutputInputs,
    RecurrentStepInputs,
    RecurrentStepSpec,
)
from torch import Tensor
from torch.nn.functional import elu, logsigmoid, silu, softplus

Result = dict[str, Tensor]
"""The output "out" [requests, num_heads * value_size], and the states of all slots by their fields."""


def defined(inputs: RecurrentStepInputs, dtype: torch.dtype) -> Result:
    """The output and the states after a step, computed in `dtype` by the equations, request by request."""
    wide = widened(inputs, dtype)
    state = {name: field.clone() for name, field in wide.state.fields.items()}
    out = [one_request(wide, request, state, int(slot)) for request, slot in enumerate(inputs.state.slots)]
    return {"out": torch.stack(out), **state}


def widened(inputs: RecurrentStepInputs, dtype: torch.dtype) -> RecurrentStepInputs:
    """The same tensors in another type of floats."""
    return mapped(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def mapped(inputs: RecurrentStepInputs, change: Callable[[Tensor], Tensor]) -> RecurrentStepInputs:
    """The inputs with every tensor changed."""

    def of(value):
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, tuple):
            parts = [of(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, SlotsInPlace):
            return SlotsInPlace({name: of(field) for name, field in value.fields.items()}, of(value.slots))
        return value

    return RecurrentStepInputs(**{field.name: of(getattr(inputs, field.name)) for field in dataclasses.fields(inputs)})


def one_request(inputs: RecurrentStepInputs, request: int, state: dict[str, Tensor], slot: int) -> Tensor:
    """The output [num_heads * value_size] of a request; replaces its states."""
    spec = inputs.spec
    query, key, value = (part[request] for part in (inputs.query, inputs.key, inputs.value))
    if inputs.convolution is not None:
        query, key, value = convolved((query, key, value), inputs.convolution, state.get("tail"), slot)
    if spec.feature_map == "silu":
        query, key, value = silu(query), silu(key), silu(value)
    elif spec.feature_map == "elu_plus_one":
        query, key = elu(query) + 1, elu(key) + 1
    if inputs.cos_sin is not None:
        query, key = (
            turned(rows, *(part[request, 0] for part in inputs.cos_sin), spec.rotary) for rows in (query, key)
        )
    if spec.unit:
        query, key = (rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt() for rows in (query, key))
    query, key = query * inputs.scales[0], key * inputs.scales[1]
    outs = []
    for head in range(spec.num_heads):
        shared = head * spec.num_key_heads // spec.num_heads
        memory = state["S"][slot, head]
        outs.append(one_head(inputs, (request, head), (query[shared], key[shared], value[head]), memory))
    return finished(inputs, torch.stack(outs), request)


def convolved(
    rows: tuple[Tensor, Tensor, Tensor], convolution: ConvolutionInputs, tail: Tensor | None, slot: int
) -> list[Tensor]:
    """Queries, keys and values [heads, size] convolved; the rows that are kept move by one."""
    channels, taps = convolution.weight.shape
    newest = rows[0].new_empty(channels)
    places = [slice(start, start + part.numel()) for start, part in zip(convolution.starts, rows, strict=True)]
    for place, part in zip(places, rows, strict=True):
        newest[place] = part.flatten()
    window = newest[None] if taps == 1 else torch.cat([tail[slot], newest[None]])
    if taps > 1:
        tail[slot] = window[1:]
    found = (window * convolution.weight.T).sum(0)
    found = found if convolution.bias is None else found + convolution.bias
    return [found[place].view(part.shape) for place, part in zip(places, rows, strict=True)]


def turned(rows: Tensor, cosines: Tensor, sines: Tensor, form: str) -> Tensor:
    """Rows [heads, size] of which the first elements turn, as complex numbers."""
    size = len(cosines)
    head, rest = rows[:, :size], rows[:, size:]
    if form == "pairs":
        first, second, cos, sin = head[:, 0::2], head[:, 1::2], cosines[0::2], sines[1::2]
        return torch.cat(
            [torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(1), rest], 1
        )
    half = size // 2
    first, second, cos, sin = head[:, :half], head[:, half:], cosines[:half], sines[half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], 1)


def one_head(
    inputs: RecurrentStepInputs, who: tuple[int, int], row: tuple[Tensor, Tensor, Tensor], memory: Tensor
) -> Tensor:
    """What the query of a head reads, [value_size]; replaces the memory [key_size, columns] in place."""
    spec, (request, head), (query, key, value) = inputs.spec, who, row
    new = value
    if inputs.decay is not None:
        rows = inputs.decay.rows[0 if len(inputs.decay.rows) == 1 else request, head]
        if spec.decay_form == "log_sigmoid":
            rows = logsigmoid(rows) / inputs.decay.temperature
        elif spec.decay_form == "softplus":
            size = softplus(rows + inputs.decay.bias[head])
            rows = -inputs.decay.rate[head].exp() * size
            new = new * size if spec.step_size else new
        memory *= rows.exp()[:, None]
    if spec.delta_rule:
        new = inputs.strength[request, head].sigmoid() * (new - memory[:, : spec.value_size].T @ key)
    if spec.normalizer:
        new = torch.cat([new, new.new_ones(1)])
    memory += key[:, None] * new[None]
    out = memory.T @ query
    if spec.normalizer:
        out = out[:-1] / (out[-1] + inputs.output.normalizer_eps)
    return out + inputs.output.skip[head] * value if spec.skip else out


def finished(inputs: RecurrentStepInputs, outs: Tensor, request: int) -> Tensor:
    """Outputs [num_heads, value_size] normed and gated, [num_heads * value_size]."""
    spec, given = inputs.spec, inputs.output
    gate = 1.0
    if given.gate is not None:
        gate = silu(given.gate[request]) if spec.gate == "silu" else given.gate[request].sigmoid()
    if not spec.norm_before_gate:
        outs = outs * gate
    if spec.norm_heads:
        groups = outs.view(-1, spec.norm_heads * spec.value_size)
        outs = (groups / (groups.square().mean(-1, keepdim=True) + given.eps).sqrt()).view(outs.shape)
        if given.norm is not None:
            outs = outs * given.norm.view(-1, spec.value_size)
    return (outs * gate if spec.norm_before_gate else outs).flatten()


def drawn(
    spec: RecurrentStepSpec, dtype: torch.dtype, slots: list[int], *, taken: int = 7, seed: int = 0
) -> RecurrentStepInputs:
    """Random tensors for a step of requests in these of `taken` slots; rows are slices of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind)

    def rows(*shape: int) -> Tensor:
        return normal(len(slots), 3 + shape[0] * shape[1])[:, 3:].unflatten(1, shape)

    heads, fading = (spec.num_heads, spec.value_size), spec.key_size if spec.decay == "channel" else 1
    into = (spec.num_key_heads, spec.key_size)
    state = {"S": normal(taken, spec.num_heads, spec.key_size, spec.columns, kind=torch.float32)}
    if spec.normalizer:
        state["S"][..., -1].abs_()
    convolution = decay = None
    if spec.taps:
        if spec.taps > 1:
            state["tail"] = normal(taken, spec.taps - 1, spec.channels)
        size = into[0] * into[1]
        starts = (size + heads[0] * heads[1], heads[0] * heads[1], 0) if spec.step_size else (0, size, 2 * size)
        bias = normal(spec.channels) if spec.step_size else None
        convolution = ConvolutionInputs(normal(spec.channels, spec.taps), bias, starts)
    if spec.decay_form == "softplus" and spec.decay != "none":
        decay = DecayInputs(rows(spec.num_heads, fading), normal(spec.num_heads), normal(spec.num_heads, fading))
    elif spec.decay_form == "log_sigmoid":
        decay = DecayInputs(rows(spec.num_heads, fading), temperature=4.0)
    elif spec.decay != "none":
        decay = DecayInputs(-normal(1, spec.num_heads, fading, kind=torch.float32).abs())
    angles = normal(len(slots), 1, spec.key_size // 4 * 2, kind=torch.float32)
    return RecurrentStepInputs(
        spec=spec,
        query=rows(*into),
        key=rows(*into),
        value=rows(*heads),
        state=SlotsInPlace(state, torch.tensor(slots, dtype=torch.int64)),
        scales=(spec.key_size**-0.5, 0.5),
        convolution=convolution,
        cos_sin=None if spec.rotary == "none" else cos_sin(angles, spec.rotary),
        decay=decay,
        strength=normal(len(slots), spec.num_heads) if spec.delta_rule else None,
        output=OutputInputs(
            skip=normal(spec.num_heads) if spec.skip else None,
            norm=normal(spec.value_size * (1 if spec.norm_heads == 1 else spec.num_heads)) if spec.norm_heads else None,
            eps=1e-5,
            gate=rows(*heads) if spec.gate != "none" else None,
            normalizer_eps=1e-6,
        ),
    )


def cos_sin(angles: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of angles, the same for both of a pair."""
    half = angles.shape[-1] // 2
    angles = angles[..., :half]
    if form == "pairs":
        return angles.cos().repeat_interleave(2, -1), torch.stack([-angles.sin(), angles.sin()], -1).flatten(-2)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
