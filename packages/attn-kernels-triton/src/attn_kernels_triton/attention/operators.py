"""Attention as custom operators of PyTorch, with fake shapes and gradients, which torch.compile keeps in its graphs.

A graph refers to a spec by a digest of its content, see `attn_core.kernels.attend.named_spec`. Eager calls bypass these
operators, whose overhead is larger than that of a kernel launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.dropout import Dropout
from attn_core.first_order import first_order_only
from attn_core.kernels.attend import SPECS, VarlenStarts, known_varlen, starts, texts
from attn_core.masks import band_of
from attn_core.modifiers import BiasTable
from torch import Tensor

from attn_kernels_triton.attention.backward import backward
from attn_kernels_triton.attention.forward import Attended, Inputs, empty, forward_launch, inputs_of
from attn_kernels_triton.attention.plan import Plan, buckets, plan_of, seed_of
from attn_kernels_triton.checks import check


def attend(name: str, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """Like `attention.attend.attend`, as an operator; `name` is that of the spec in `SPECS`.

    The output is [batch, query, heads, value_size].
    """
    given, numbers = given_places(operands)
    weights = [operands.parameters[weight] for weight in spec.weights]
    names = " ".join([name, *given])
    rows = operands.query, operands.key, operands.value
    out: Tensor = attend_named(*rows, list(given.values()), weights, names, numbers)[0]
    return out


def given_places(operands: AttentionInputs) -> tuple[dict[str, Tensor], list[float]]:
    """The optional tensors of the operands by name, and the dropout probability, offset and first row.

    The tensors are the fields that are not None, `SEED`, the dropout seed [], int64, and `STARTS`, where the queries
    and the keys of documents begin. Seed and starts are on the CPU, where reading them needs no synchronization.
    """
    places = ("key_padding_mask", "query_positions", "key_positions")
    given = {place: getattr(operands, place) for place in places if getattr(operands, place) is not None}
    # Always three numbers: PyTorch would infer an empty list to be one of tensors.
    numbers = [0.0, 0.0, 0.0]
    varlen, dropout = operands.varlen, operands.dropout
    if isinstance(varlen, VarlenStarts):
        given |= dict(zip(STARTS, (varlen.queries, varlen.keys), strict=True))
    elif varlen is not None:
        lengths = varlen.queries, varlen.keys
        given |= {name: torch.tensor(starts(each), device="cpu") for name, each in zip(STARTS, lengths, strict=True)}
    if dropout is not None:
        given[SEED] = seed_of(dropout)
        numbers = [dropout.probability, float(dropout.offset), float(dropout.first)]
    return given, numbers


STARTS = ("query_starts", "key_starts")
SEED = "seed"


def parse_call(
    names: str, rows: Sequence[Tensor], places: Sequence[Tensor], weights: Sequence[Tensor], numbers: Sequence[float]
) -> Call:
    """Rebuild spec and operands from the arguments of an operator; raises `InvalidValue`, see `checks`."""
    name, *given = names.split(" ")
    spec = SPECS[name]
    query, key, value = rows
    parameters = dict(zip(spec.weights, weights, strict=True))
    others: dict[str, Any] = dict(zip(given, places, strict=True))
    if STARTS[0] in others:
        others["varlen"] = VarlenStarts(*(others.pop(each) for each in STARTS)).known()
    if SEED in others:
        probability, offset, first = numbers
        seed = others.pop(SEED)
        others["dropout"] = Dropout(probability=probability, seed=seed, offset=int(offset), first=int(first))
    operands = AttentionInputs(query=query, key=key, value=value, parameters=parameters, **others)
    check(spec, operands)
    return Call(spec, operands)


class Call(NamedTuple):
    """A spec and its operands."""

    spec: AttentionSpec
    operands: AttentionInputs

    def parts(self) -> list[tuple[slice, Inputs, Plan]]:
        """The query slice, inputs and plan of each launch: one for all, or one per document if the mask is no band.

        The block lists of other masks depend on the length of each document.
        """
        varlen = known_varlen(self.operands)
        if varlen is None or band_of(self.spec.mask) is not None:
            return [(slice(None), inputs_of(self.operands), plan_of(self.spec, self.operands))]
        found = zip(varlen.spans(), texts(self.operands), strict=True)
        return [(span, inputs_of(text), plan_of(self.spec, text)) for (span, _), text in found]


@torch.library.custom_op("attn_kernels_triton::attend", mutates_args=())
def attend_named(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: list[Tensor],
    weights: list[Tensor],
    spec: str,
    numbers: list[float],
) -> tuple[Tensor, Tensor]:
    """The output and the base-2 lse [batch, heads, query], float32.

    `spec` is the name of the spec followed by the names of the tensors in `places`, separated by spaces, see
    `given_places`; `weights` are the parameters of the spec in order.
    """
    return attended(parse_call(spec, (query, key, value), places, weights, numbers))


def attended(call: Call) -> tuple[Tensor, Tensor]:
    """Run the forward kernel for each part of a call."""
    found = []
    for _, inputs, plan in call.parts():
        result = empty(plan, inputs)
        forward_launch(plan, inputs, result).run(inputs.query.device)
        found.append(result)
    if len(found) == 1:
        return found[0].out, found[0].lse
    return torch.cat([part.out for part in found], 1), torch.cat([part.lse for part in found], 2)


@torch.library.custom_op("attn_kernels_triton::attend_backward", mutates_args=())
def attend_named_backward(
    change: Tensor,
    saved: list[Tensor],
    places: list[Tensor],
    weights: list[Tensor],
    spec: str,
    numbers: list[float],
) -> list[Tensor]:
    """The gradients of queries, keys, values and weights, given that of the output, `change`.

    `saved` are queries, keys, values, output and lse; the other arguments are those of `attend_named`.
    """
    call = parse_call(spec, saved[:3], places, weights, numbers)
    return run_backward(call, change, Attended(*saved[3:]), weights)


def run_backward(call: Call, change: Tensor, attended: Attended, weights: Sequence[Tensor]) -> list[Tensor]:
    """Run the backward kernels for each part of a call."""
    found = []
    for span, inputs, plan in call.parts():
        bias = None if plan.bias is None else plan.bias.detach().requires_grad_()
        result = Attended(attended.out[:, span], attended.lse[:, :, span].contiguous())
        found.append(backward(dataclasses.replace(plan, bias=bias), inputs, result, change[:, span]))
    to_weights = [
        torch.stack([gradient_of(call.spec, name, weight, part.sink, part.bias) for part in found]).sum(0)
        for name, weight in zip(call.spec.weights, weights, strict=True)
    ]
    if len(found) == 1:
        return [*found[0].inputs, *to_weights]
    return [*(torch.cat(parts, 1) for parts in zip(*(part.inputs for part in found), strict=True)), *to_weights]


def gradient_of(spec: AttentionSpec, name: str, weight: Tensor, sink: Tensor | None, bias: Tensor | None) -> Tensor:
    """The gradient of a parameter of the spec, given those of the sinks [heads] and the biases [heads, distances]."""
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
    return shapes_of(query, value)


def shapes_of(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors with the shapes and dtypes of the output and lse."""
    batch, queries, heads = query.shape[:3]
    out = query.new_empty(batch, queries, heads, value.shape[-1])
    return out, query.new_empty(batch, heads, queries, dtype=torch.float32)


@attend_named_backward.register_fake
def _(_change: Tensor, saved: list[Tensor], _places: list[Tensor], weights: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(part) for part in (*saved[:3], *weights)]


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward pass needs (`setup_context`)."""
    query, key, value, places, weights, ctx.spec, ctx.numbers = inputs
    ctx.places = len(places)
    ctx.save_for_backward(query, key, value, *output, *places, *weights)


@first_order_only
def back(ctx: Any, change: Tensor, _lse: Tensor | None) -> tuple[Any, ...]:
    """The gradients of the operator's arguments."""
    saved, rest = list(ctx.saved_tensors[:5]), list(ctx.saved_tensors[5:])
    places, weights = rest[: ctx.places], rest[ctx.places :]
    found = attend_named_backward(change.contiguous(), saved, places, weights, ctx.spec, ctx.numbers)
    return *found[:3], [None] * len(places), found[3:], None, None


attend_named.register_autograd(back, setup_context=save_for_backward)
