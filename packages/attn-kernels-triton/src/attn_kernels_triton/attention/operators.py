"""Attention as operators of torch, which torch.compile keeps whole in its graphs: with shapes and gradients registered.

A graph names a spec by a digest of what it says, see `attn_core.kernels.attend.named_spec`. Uncompiled calls go without
these operators, whose bookkeeping takes longer than starting a program. Where the chip cannot run a program, what the
spec has in `NEXT` computes instead, gradients from the rows again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.dropout import Dropout
from attn_core.kernels.attend import NEXT, SPECS, VarlenStarts, known_varlen, starts, texts
from attn_core.kernels.dispatch import Replaceable
from attn_core.masks import band_of
from attn_core.modifiers import BiasTable
from torch import Tensor

from attn_kernels_triton.attention.backward import backward
from attn_kernels_triton.attention.forward import Attended, Inputs, empty, forward_launch, inputs_of
from attn_kernels_triton.attention.plan import Plan, buckets, plan_of, seed_of
from attn_kernels_triton.checks import check
from attn_kernels_triton.machine import uncompilable
from attn_kernels_triton.replaced import gradients_of, values_of

OPERATOR = Replaceable("triton_attend", uncompilable)
"""How both operators find that the chip cannot run their programs."""


def attend(name: str, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size] of the spec of this name, as of `attention.attend.attend`."""
    given, numbers = given_places(operands)
    weights = [operands.parameters[weight] for weight in spec.weights]
    said = " ".join([name, *given])
    rows = operands.query, operands.key, operands.value
    out: Tensor = attend_named(*rows, list(given.values()), weights, said, numbers)[0]
    return out


def given_places(operands: AttentionInputs) -> tuple[dict[str, Tensor], list[float]]:
    """What of the operands an operator is told by name, and the numbers of dropout.

    Beside fields that may be None these are `SEED`, the seed of dropout [], int64, whose probability, offset and first
    row are the numbers, and `STARTS`, where the queries and the keys of documents begin. Seed and starts lie on the
    CPU, where reading them waits for nothing.
    """
    places = ("key_padding_mask", "query_positions", "key_positions")
    given = {place: getattr(operands, place) for place in places if getattr(operands, place) is not None}
    # Three, always: torch takes an empty list of numbers for one of tensors.
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


def understood(
    said: str, rows: Sequence[Tensor], places: Sequence[Tensor], weights: Sequence[Tensor], numbers: Sequence[float]
) -> Call:
    """What the arguments of an operator mean; raises `InvalidValue`, see `checks`."""
    name, *given = said.split(" ")
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
    return Call(name, spec, operands)


class Call(NamedTuple):
    """A spec, its name, and its operands."""

    name: str
    spec: AttentionSpec
    operands: AttentionInputs

    @property
    def kind(self) -> tuple[str, torch.dtype, torch.device]:
        """By what calls are told apart where the chip cannot run programs."""
        return self.name, self.operands.query.dtype, self.operands.query.device

    @property
    def rows(self) -> Inputs:
        """Queries, keys and values."""
        return inputs_of(self.operands)

    def next(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The output of the kernel that comes next, of queries, keys, values and the weights in their order."""
        weights = dict(zip(self.spec.weights, leaves[3:], strict=True))
        query, key, value = leaves[:3]
        given = dataclasses.replace(self.operands, query=query, key=key, value=value, parameters=weights)
        return [NEXT[self.name](given, OPERATOR.kernel)]

    def parts(self) -> list[tuple[slice, Inputs, Plan]]:
        """The queries, inputs and plan of all that one program computes: of each document where the mask is no band,
        whose blocks depend on the length of each."""
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
    """The output and to the base 2 the lse [batch, heads, query], float32.

    `spec` is the name of the spec and, after spaces, of the `places` that are given, see `given_places`; `weights` are
    the parameters of the spec in its order.
    """
    call = understood(spec, (query, key, value), places, weights, numbers)

    def replace() -> tuple[Tensor, Tensor]:
        out, lse = shapes_of(query, value)
        return values_of(lambda: call.next([*call.rows, *weights]), [out])[0], lse

    return OPERATOR.run(call.kind, lambda: attended(call), replace if call.name in NEXT else None)


def attended(call: Call) -> tuple[Tensor, Tensor]:
    """Run the forward programs."""
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
    """Gradients to queries, keys, values and weights of a gradient to the output; `saved` are rows, output and lse."""
    call = understood(spec, saved[:3], places, weights, numbers)

    def replace() -> list[Tensor]:
        return gradients_of(call.next, [*saved[:3], *weights], [change])

    def compute() -> list[Tensor]:
        return run_backward(call, change, Attended(*saved[3:]), weights)

    return OPERATOR.run(call.kind, compute, replace if call.name in NEXT else None)


def run_backward(call: Call, change: Tensor, attended: Attended, weights: Sequence[Tensor]) -> list[Tensor]:
    """Run the backward programs."""
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
    return shapes_of(query, value)


def shapes_of(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Where the operator writes its output and lse."""
    batch, queries, heads = query.shape[:3]
    out = query.new_empty(batch, queries, heads, value.shape[-1])
    return out, query.new_empty(batch, heads, queries, dtype=torch.float32)


@attend_named_backward.register_fake
def _(_change: Tensor, saved: list[Tensor], _places: list[Tensor], weights: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(part) for part in (*saved[:3], *weights)]


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the gradient needs."""
    query, key, value, places, weights, ctx.spec, ctx.numbers = inputs
    ctx.places = len(places)
    ctx.save_for_backward(query, key, value, *output, *places, *weights)


def back(ctx: Any, change: Tensor, _lse: Tensor | None) -> tuple[Any, ...]:
    """The gradients to what the operator was given."""
    saved, rest = list(ctx.saved_tensors[:5]), list(ctx.saved_tensors[5:])
    places, weights = rest[: ctx.places], rest[ctx.places :]
    found = attend_named_backward(change.contiguous(), saved, places, weights, ctx.spec, ctx.numbers)
    return *found[:3], [None] * len(places), found[3:], None, None


attend_named.register_autograd(back, setup_context=remember)
