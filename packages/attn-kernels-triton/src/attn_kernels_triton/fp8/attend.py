"""Attention whose products are of e4m3 codes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from attn_core import AttentionSpec, Operands
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_kernels_triton.attention.checks import check, check_count
from attn_kernels_triton.attention.dense import has_copier
from attn_kernels_triton.attention.forward import Attended, Inputs, empty, inputs_of
from attn_kernels_triton.attention.plan import Plan, plan_of
from attn_kernels_triton.attention.tiles import tile_of
from attn_kernels_triton.fp8.codes import ROWS, Coded, blocks_of, codes_launch, empty_codes, width_of
from attn_kernels_triton.fp8.tiles import coded_choice, described
from attn_kernels_triton.kernels import fp8_arguments
from attn_kernels_triton.kernels.arguments import Places
from attn_kernels_triton.kernels.fp8 import attend_codes
from attn_kernels_triton.launch import Launch, rows


class Rounded(NamedTuple):
    """Queries, keys and values in codes; `rotated` says that queries and keys are."""

    query: Coded
    key: Coded
    value: Coded
    rotated: bool


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(spec: AttentionSpec, operands: Operands, *, rotated: bool = True) -> Tensor:
    """The output [batch, query, heads, value_size] in the type of the values, without gradients.

    Raises `InvalidValue` for what the programs would misread, and for chips whose matrix units take no e4m3.
    """
    plan = checked_plan(spec, operands)
    inputs = Inputs(*(tensor.detach() for tensor in inputs_of(operands)))
    result, coded = empty(plan, inputs), empty_coded(inputs, rotated=rotated)
    for launch in launches(plan, inputs, coded, result):
        launch.run(inputs.query.device)
    return result.out


def checked_plan(spec: AttentionSpec, operands: Operands) -> Plan:
    """The plan of a band over operands that can be rounded."""
    check(spec, operands)
    query, plan = operands.query, plan_of(spec, operands)
    if query.dtype.itemsize != torch.bfloat16.itemsize:
        raise InvalidValue.of("query.dtype", str(query.dtype), "bfloat16 or float16")
    for name, tensor in (("query", query), ("key", operands.key), ("value", operands.value)):
        check_codes(name, tensor)
    if not has_copier(query.device):
        raise InvalidValue.of("query.device", str(query.device), "a GPU of compute capability 9.0 or more")
    if plan.rule.scale <= 0:
        raise InvalidValue.of("score.scale", plan.rule.scale, "a number above zero")
    if operands.packed is not None:
        raise InvalidValue.of("packed", operands.packed, "None: each row is one text")
    if plan.bias is not None or operands.dropout is not None:
        raise InvalidValue.of("modifiers, dropout", "learned biases or dropout", "neither")
    if plan.lists is not None or plan.texts is not None or plan.places != Places():
        raise InvalidValue.of("mask", str(spec.mask), "a band: full, causal, or a window, nothing padded or placed")
    return plan


def check_codes(name: str, rows: Tensor) -> None:
    """Rows [batch, row, head, size] whose codes, filled up to whole blocks, programs can count."""
    batch, count, heads, size = rows.shape
    held = blocks_of(count) * ROWS
    check_count(f"{name}: codes of a head", held * width_of(size))
    check_count(f"{name}: rows of all heads", batch * heads * max(held, width_of(size)))


def empty_coded(inputs: Inputs, *, rotated: bool) -> Rounded:
    """Where codes are written."""
    query, key = (empty_codes(tensor, turned=False) for tensor in (inputs.query, inputs.key))
    return Rounded(query, key, empty_codes(inputs.value, turned=True), rotated)


def launches(plan: Plan, inputs: Inputs, coded: Rounded, result: Attended) -> list[Launch]:
    """Programs that round, and the one that meets what they wrote; nothing where there are no queries or no keys."""
    if not min(plan.sizes.queries, plan.sizes.keys):
        result.out.zero_()
        return []
    made = [
        codes_launch(inputs.query, coded.query, turned=False, rotated=coded.rotated),
        codes_launch(inputs.key, coded.key, turned=False, rotated=coded.rotated),
        codes_launch(inputs.value, coded.value, turned=True, rotated=False),
    ]
    return [*made, attend_launch(plan, coded, result)]


def attend_launch(plan: Plan, coded: Rounded, result: Attended) -> Launch:
    """The program that meets codes."""
    sizes, choice = plan.sizes, coded_choice(plan.sizes, plan.rule)
    widths = width_of(sizes.key_size), width_of(sizes.value_size)
    scale = plan.rule.scale / widths[0] if coded.rotated else plan.rule.scale
    call = fp8_arguments.Coded(
        query_scales=coded.query.scales,
        key_scales=coded.key.scales,
        value_scales=coded.value.scales,
        out=rows(result.out),
        lse=result.lse,
        shape=plan.shape,
        rule=plan.rule._replace(scale=scale),
        places=plan.places,
        tile=tile_of(choice, sizes)._replace(key_width=tl.constexpr(widths[0]), value_width=tl.constexpr(widths[1])),
    )
    programs = -(-plan.sizes.queries // choice.queries) * plan.batch * plan.shape.heads
    tiles = described(choice, coded.query.codes, coded.key.codes, coded.value.codes)
    return Launch(
        program=attend_codes, programs=programs, call=call, warps=choice.warps, stages=choice.stages, tiles=tiles
    )
