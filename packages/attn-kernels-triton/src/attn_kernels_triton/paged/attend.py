"""Attention of new rows to remembered ones where a cache keeps them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from attn_core import AttentionSpec
from attn_core.errors import InvalidValue
from attn_core.kernels.paged import PagedOperands
from attn_core.masks import band_of
from torch import Tensor

from attn_kernels_triton.attention.biases import bias_of
from attn_kernels_triton.attention.plan import rule_of, sink_of, with_learned
from attn_kernels_triton.kernels.arguments import Rows, Rule
from attn_kernels_triton.kernels.paged import attend_paged, merge_paged
from attn_kernels_triton.kernels.paged_arguments import NO_MEMORY, Memory, Merge, Paged, PagedTile
from attn_kernels_triton.launch import Launch, power_of_two
from attn_kernels_triton.paged.choices import BIASED, INT4, TREE, PagedChoice, choice_of, many
from attn_kernels_triton.paged.items import FEW, Heads
from attn_kernels_triton.paged.memory import check, memory_of
from attn_kernels_triton.paged.prepared import Portion, prepared
from attn_kernels_triton.tuning.chosen import measured_paged


class Met(NamedTuple):
    """What queries meet: keys, their second part, values, and the size of the first part of keys."""

    key: Memory
    rest: Memory
    value: Memory
    first: int


def attend_rows(spec: AttentionSpec, operands: PagedOperands) -> Tensor:
    """The output [tokens, heads, value_size] in the type of the queries; raises `InvalidValue`, see `paged.memory`."""
    check(spec, operands)
    out = operands.query.new_empty(*operands.query.shape[:2], spec.heads.value_size)
    for launch in launches(spec, operands, out):
        launch.run(out.device)
    return out


def launches(spec: AttentionSpec, operands: PagedOperands, out: Tensor, few: PagedChoice | None = None) -> list[Launch]:
    """The programs in the order in which they run; `few` is the choice for tiles of few rows, if it is not to be looked
    up."""
    band = band_of(spec.mask)
    if band is None or band.right != 0:
        raise InvalidValue.of("mask", spec.mask.kind, "causal, or a window that ends at the query")
    owners = spec.heads.key_value
    met = met_of(spec, operands)
    sink, bias = sink_of(spec, operands.query, operands.parameters), bias_of(spec, operands.parameters)
    rule = with_learned(rule_of(spec, operands.query, band), sink, bias)
    sizes = met.first, spec.heads.value_size
    if few is None and bias is None:
        few = measured_paged(operands.query, operands.rows.form, sizes)
    times = 1 if few is None else few.times
    heads = Heads(spec.heads.query // owners, owners, many(operands.query.dtype, *sizes), times)
    work = prepared(operands, heads, band.left, met.key.data.shape[0])
    found = []
    for portion in work.portions:
        attend = attend_launch((spec, operands, out), (met, rule, few), portion)
        found.append(attend)
        if len(portion.merges):
            found.append(merge_launch(attend, portion))
    return found


def met_of(spec: AttentionSpec, operands: PagedOperands) -> Met:
    """The memory of keys and values, or of latents and the rotary part of keys."""
    heads = spec.heads
    if "latent" in operands.rows.fields:
        latent = memory_of(operands, "latent", 1, heads.value_size)
        rest = memory_of(operands, "rotary_key", 1, heads.key_size - heads.value_size)
        return Met(latent, rest, NO_MEMORY, heads.value_size)
    key = memory_of(operands, "key", heads.key_value, heads.key_size)
    return Met(key, NO_MEMORY, memory_of(operands, "value", heads.key_value, heads.value_size), heads.key_size)


def attend_launch(
    call: tuple[AttentionSpec, PagedOperands, Tensor], asked: tuple[Met, Rule, PagedChoice | None], portion: Portion
) -> Launch:
    """The program that meets rows, for tiles of one kind."""
    (spec, operands, out), (met, rule, few) = call, asked
    query, value_size = operands.query, out.shape[2]
    rest = 0 if met.rest.data is None else spec.heads.key_size - met.first
    present = {BIASED: rule.bias is not None, TREE: portion.tables.seen is not None, INT4: operands.rows.form == INT4}
    takes = [what for what, there in present.items() if there]
    choice = choice_of(portion.tile, query.dtype, met.first, value_size, takes=takes)
    # What was measured without any of these may leave them no registers.
    if few is not None and portion.tile == FEW and not takes:
        choice = few
    sizes = (met.first, value_size, rest)
    tile = PagedTile(*map(tl.constexpr, (portion.tile, choice.keys, *sizes, *map(power_of_two, sizes))))
    sums = torch.empty(portion.slots, portion.tile, power_of_two(value_size), dtype=torch.float32, device=out.device)
    argument = Paged(
        query=Rows(query, 0, query.stride(0), query.stride(1)),
        key=met.key,
        rest=met.rest,
        value=met.value,
        out=Rows(out, 0, out.stride(0), out.stride(1)),
        numbers=portion.tables.numbers,
        stride=portion.tables.numbers.stride(0),
        firsts=portion.tables.firsts,
        bases=portion.tables.bases,
        seen=portion.tables.seen,
        words=None if portion.tables.seen is None else portion.tables.seen.stride(0),
        positions=operands.batch.positions,
        items=portion.items,
        sums=sums,
        lse=torch.empty(portion.slots, portion.tile, dtype=torch.float32, device=out.device),
        heads=spec.heads.query,
        group=spec.heads.query // spec.heads.key_value,
        rule=rule,
        tile=tile,
    )
    programs = len(portion.items) * spec.heads.key_value
    return Launch(program=attend_paged, programs=programs, call=argument, warps=choice.warps, stages=choice.stages)


def merge_launch(attend: Launch, portion: Portion) -> Launch:
    """The program that merges what another left in parts."""
    done: Paged = attend.call
    argument = Merge(done.out, portion.merges, done.sums, done.lse, done.heads, done.group, done.rule, done.tile)
    programs = len(portion.merges) * (done.heads // done.group)
    # As many numbers a thread as leave room for as many that are read.
    warps = max(4, done.sums.shape[1] * done.sums.shape[2] // 2048)
    return Launch(program=merge_paged, programs=programs, call=argument, warps=warps, stages=2)
