"""Attention as operators of torch, which torch.compile keeps whole in its graphs: with shapes and gradients registered.

A graph names a spec by a digest of what it says, see `attn_core.kernels.attend.named_spec`. Uncompiled calls go without
these operators, whose bookkeeping takes longer than starting a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.kernels.attend import SPECS
from attn_core.modifiers import BiasTable
from torch import Tensor

from attn_kernels_triton.attention.backward import backward
from attn_kernels_triton.attention.forward import Attended, Inputs, empty, forward_launch, inputs_of
from attn_kernels_triton.attention.plan import Plan, buckets, plan_of
from attn_kernels_triton.checks import check


def attend(name: str, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size] of the spec of this name, as of `attention.attend.attend`."""
    given = {place: getattr(operands, place) for place in PLACES if getattr(operands, place) is not None}
    weights = [operands.parameters[weight] for weight in spec.weights]
    said = " ".join([name, *given])
    out: Tensor = attend_named(operands.query, operands.key, operands.value, list(given.values()), weights, said)[0]
    return out


PLACES = ("key_padding_mask", "query_positions", "key_positions")
"""Fields of `AttentionInputs` that may be None: an operator is told by name which it is given."""


def understood(
    said: str, rows: Sequence[Tensor], places: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[AttentionSpec, AttentionInputs, Plan]:
    """What the arguments of an operator mean; raises `InvalidValue`, see `checks`."""
    name, *given = said.split(" ")
    spec = SPECS[name]
    query, key, value = rows
    parameters = dict(zip(spec.weights, weights, strict=True))
    others: dict[str, Any] = dict(zip(given, places, strict=True))
    operands = AttentionInputs(query=query, key=key, value=value, parameters=parameters, **others)
    check(spec, operands)
    return spec, operands, plan_of(spec, operands)


@torch.library.custom_op("attn_kernels_triton::attend", mutates_args=())
def attend_named(
    query: Tensor, key: Tensor, value: Tensor, places: list[Tensor], weights: list[Tensor], spec: str
) -> tuple[Tensor, Tensor]:
    """The output and to the base 2 the lse [batch, heads, query], float32.

    `spec` is the name of the spec and, after spaces, of those `PLACES` that are given, `weights` are the parameters of
    the spec in its order.
    """
    _, operands, plan = understood(spec, (query, key, value), places, weights)
    result = empty(plan, inputs_of(operands))
    forward_launch(plan, inputs_of(operands), result).run(query.device)
    return result.out, result.lse


@torch.library.custom_op("attn_kernels_triton::attend_backward", mutates_args=())
def attend_named_backward(
    change: Tensor, saved: list[Tensor], places: list[Tensor], weights: list[Tensor], spec: str
) -> list[Tensor]:
    """Gradients to queries, keys, values and weights of a gradient to the output; `saved` are rows, output and lse."""
    own, _, plan = understood(spec, saved[:3], places, weights)
    bias = None if plan.bias is None else plan.bias.detach().requires_grad_()
    found = backward(dataclasses.replace(plan, bias=bias), Inputs(*saved[:3]), Attended(*saved[3:]), change)
    to_weights = [
        gradient_of(own, name, weight, found.sink, found.bias)
        for name, weight in zip(own.weights, weights, strict=True)
    ]
    return [*found.inputs, *to_weights]


def gradient_of(spec: AttentionSpec, name: str, weight: Tensor, sink: Tensor | None, bias: Tensor | None) -> Tensor:
    """The gradient to a weight of those to the sinks [heads] and to the biases [heads, distances] it became."""
    if name == "distribution.logit" and sink is not None:
        return sink.to(weight.dtype)
    for modifier in spec.modifiers:
        if isinstance(modifier, BiasTable) and name == f"modifiers.{modifier.kind}.table" and bias is not None:
            places = buckets(modifier, bias.shape[1] // 2, bias.device)
            summed = torch.zeros(weight.shape, dtype=torch.float32, device=bias.device)
            return summed.index_add_(0, places, bias.t()).to(weight.dtype)
    return torch.zeros_like(weight)


@attend_named.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, queries, heads = query.shape[:3]
    out = query.new_empty(batch, queries, heads, value.shape[-1])
    return out, query.new_empty(batch, heads, queries, dtype=torch.float32)


@attend_named_backward.register_fake
def _(_change: Tensor, saved: list[Tensor], _places: list[Tensor], weights: list[Tensor], _: str) -> list[Tensor]:
    return [torch.empty_like(part) for part in (*saved[:3], *weights)]


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the gradient needs."""
    query, key, value, places, weights, ctx.spec = inputs
    ctx.places = len(places)
    ctx.save_for_backward(query, key, value, *output, *places, *weights)


def back(ctx: Any, change: Tensor, _lse: Tensor | None) -> tuple[Any, ...]:
    """The gradients to what the operator was given."""
    saved, rest = list(ctx.saved_tensors[:5]), list(ctx.saved_tensors[5:])
    places, weights = rest[: ctx.places], rest[ctx.places :]
    found = attend_named_backward(change.contiguous(), saved, places, weights, ctx.spec)
    return *found[:3], [None] * len(places), found[3:], None


attend_named.register_autograd(back, setup_context=remember)
