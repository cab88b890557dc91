"""Checks of the tensors of a decode step over states in slots before a kernel is launched."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrent_step import RecurrentStepInputs, RecurrentStepSpec
from torch import Tensor

from attn_kernels_triton.checks import DTYPES, check_count, check_like
from attn_kernels_triton.machine import interpreted

Shapes = dict[str, tuple[Tensor | None, tuple[int, ...] | None]]
"""Tensors by name (None if absent) with the shapes that they must have (None if they must be absent)."""


def check_step(inputs: RecurrentStepInputs) -> None:
    """Raise `InvalidValue` for tensors whose shapes, dtypes, devices, strides or sizes the kernels do not support."""
    query = inputs.query
    if query.dim() != 3:
        raise InvalidValue.of("query", list(query.shape), "three axes: request, head, size")
    if query.device.type != "cuda" and not interpreted():
        raise InvalidValue.of("query.device", str(query.device), "a GPU: these kernels do not run on a CPU")
    requests = query.shape[0]
    for name, (tensor, shape) in {**rows_of(inputs, requests), **parameters_of(inputs)}.items():
        if tensor is None or shape is None:
            if tensor is not None or shape is not None:
                given, allowed = (
                    ("None", str(list(shape))) if shape else ("a tensor", "None, because the spec does not use it")
                )
                raise InvalidValue.of(name, given, allowed)
            continue
        check_like(name, tensor, shape, query.device)
        check_dtype(name, tensor)
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise InvalidValue.of(
                f"{name}.stride", list(tensor.stride()), "one that ends in 1 (a contiguous last axis)"
            )
    check_state(inputs, requests)
    check_output(inputs)
    check_count("elements of the states of all requests' heads", requests * inputs.spec.num_heads * 32)


def rows_of(inputs: RecurrentStepInputs, requests: int) -> Shapes:
    """The tensors with an entry per request and their required shapes."""
    spec, decay = inputs.spec, inputs.decay
    rotated = None if inputs.cos_sin is None else inputs.cos_sin[0].shape[-1]
    angles = (requests, 1, rotated or 0) if spec.rotary != "none" else None
    cosines, sines = inputs.cos_sin or (None, None)
    decay_shape = None
    if spec.decay != "none":
        given = 1 if decay is not None and decay.rows.shape[0] == 1 else requests
        decay_shape = (given, spec.num_heads, spec.key_size if spec.decay == "channel" else 1)
    heads = (requests, spec.num_heads)
    return {
        "query": (inputs.query, (requests, spec.num_key_heads, spec.key_size)),
        "key": (inputs.key, (requests, spec.num_key_heads, spec.key_size)),
        "value": (inputs.value, (*heads, spec.value_size)),
        "cos_sin[0]": (cosines, angles),
        "cos_sin[1]": (sines, angles),
        "decay.rows": (None if decay is None else decay.rows, decay_shape),
        "strength": (inputs.strength, heads if spec.delta_rule else None),
        "output.gate": (inputs.output.gate, (*heads, spec.value_size) if spec.gate != "none" else None),
    }


def parameters_of(inputs: RecurrentStepInputs) -> Shapes:
    """The parameters of a layer and their required shapes; raises `InvalidValue` for one that is not contiguous."""
    spec, decay, convolution, output = inputs.spec, inputs.decay, inputs.convolution, inputs.output
    soft = spec.decay != "none" and spec.decay_form == "softplus"
    biases = (spec.num_heads, spec.key_size if spec.decay == "channel" else 1)
    filters = (spec.channels, spec.taps) if spec.taps else None
    found: Shapes = {
        "decay.rate": (None if decay is None else decay.rate, (spec.num_heads,) if soft else None),
        "decay.bias": (None if decay is None else decay.bias, biases if soft else None),
        "convolution.weight": (None if convolution is None else convolution.weight, filters),
        "output.skip": (output.skip, (spec.num_heads,) if spec.skip else None),
    }
    if convolution is not None and convolution.bias is not None:
        found["convolution.bias"] = convolution.bias, (spec.channels,)
    if output.norm is not None:
        of_each = spec.norm_heads == 1 and output.norm.shape == (spec.value_size,)
        whole = (spec.value_size if of_each else spec.num_heads * spec.value_size,)
        found["output.norm"] = output.norm, whole if spec.norm_heads else None
    for name, (tensor, _) in found.items():
        if tensor is not None and not tensor.is_contiguous():
            raise InvalidValue.of(f"{name}.stride", list(tensor.stride()), "the strides of a contiguous tensor")
    return found


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise `InvalidValue` for a dtype that is not supported; cosines and sines must be float32."""
    exact = name.startswith("cos_sin")
    if tensor.dtype not in DTYPES or (exact and tensor.dtype != torch.float32):
        raise InvalidValue.of(
            f"{name}.dtype", str(tensor.dtype), "float32" if exact else "float32, bfloat16 or float16"
        )


def check_state(inputs: RecurrentStepInputs, requests: int) -> None:
    """Raise `InvalidValue` for unsupported states, cached convolution inputs or slot numbers."""
    spec, state = inputs.spec, inputs.state
    states = state.fields["S"]
    device = inputs.query.device
    check_like("state.fields['S']", states, (len(states), spec.num_heads, spec.key_size, spec.columns), device)
    if states.dtype != torch.float32 or states.stride(-1) != 1:
        given = f"{states.dtype}, strides {list(states.stride())}"
        raise InvalidValue.of("state.fields['S']", given, "float32, with a contiguous last axis")
    if spec.taps > 1:
        if "tail" not in state.fields:
            raise InvalidValue.of(
                "state.fields", sorted(state.fields), "S and tail, the cached inputs of the convolution"
            )
        tail = state.fields["tail"]
        check_like("state.fields['tail']", tail, (len(states), spec.taps - 1, spec.channels), device)
        check_dtype("state.fields['tail']", tail)
        if tail.stride(-1) != 1:
            raise InvalidValue.of(
                "state.fields['tail'].stride", list(tail.stride()), "one that ends in 1 (a contiguous last axis)"
            )
    check_like("state.slots", state.slots, (requests,), device)
    if state.slots.dtype != torch.int64 or not state.slots.is_contiguous():
        given = f"{state.slots.dtype}, stride {state.slots.stride()}"
        raise InvalidValue.of("state.slots", given, "int64, contiguous")


def check_output(inputs: RecurrentStepInputs) -> None:
    """Raise `InvalidValue` unless heads that are normalized together have contiguous gates, the number of rotated
    elements is even and at most the key size, and the channels of a convolution do not overlap."""
    spec, gate = inputs.spec, inputs.output.gate
    if gate is not None and spec.norm_heads > 1 and gate.stride(1) != spec.value_size:
        given = list(gate.stride())
        raise InvalidValue.of("output.gate.stride", given, "contiguous heads, if they are normalized together")
    if inputs.cos_sin is not None:
        rotated = inputs.cos_sin[0].shape[-1]
        if rotated % 2 or not 2 <= rotated <= spec.key_size:
            raise InvalidValue.of("cos_sin", rotated, f"an even number of elements up to {spec.key_size}")
    if inputs.convolution is not None:
        check_starts(spec, inputs.convolution.starts)


def check_starts(spec: RecurrentStepSpec, starts: tuple[int, int, int]) -> None:
    """Raise `InvalidValue` unless queries, keys and values divide the channels without gap or overlap."""
    into = spec.num_key_heads * spec.key_size
    spans = sorted(zip(starts, (into, into, spec.num_heads * spec.value_size), strict=True))
    at = 0
    for start, length in spans:
        if start != at:
            raise InvalidValue.of(
                "convolution.starts",
                starts,
                f"queries, keys and values that fill {spec.channels} channels without overlap",
            )
        at += length
