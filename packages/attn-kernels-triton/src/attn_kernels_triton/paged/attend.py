"""Attention of new tokens to the rows of a paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import triton.language as tl
from attn_core import AttentionSpec
from attn_core.batch import Fields
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from attn_core.masks import Band, band_of
from torch import Tensor

from attn_kernels_triton.attention.plan import bias_of, rule_of, sink_of, with_learned
from attn_kernels_triton.checks import DTYPES, FARTHEST, check_count, check_like
from attn_kernels_triton.kernels.arguments import Rows, Rule
from attn_kernels_triton.kernels.paged import NO_MEMORY, Memory, Merge, Paged, PagedTile, attend_paged, merge_paged
from attn_kernels_triton.launch import Launch, power_of_two, processors
from attn_kernels_triton.machine import interpreted
from attn_kernels_triton.paged.schedule import Portion, Shared, prepared
from attn_kernels_triton.paged.tiles import (
    BIASED,
    FEW,
    INT4,
    INT8,
    NARROWEST,
    TREE,
    Heads,
    PagedChoice,
    choice_of,
    many,
)
from attn_kernels_triton.tuning.candidates import paged_name
from attn_kernels_triton.tuning.store import known


def check(spec: AttentionSpec, operands: PagedAttentionInputs) -> None:
    """Raise `InvalidValue` for operands whose shapes, dtypes, devices, strides or sizes the kernels do not support.

    Row numbers are checked once per step, see `paged.schedule.prepared`.
    """
    query, batch, rows = operands.query, operands.batch, operands.rows
    tokens = sum(batch.lengths)
    if query.device.type != "cuda" and not interpreted():
        raise InvalidValue.of("query.device", str(query.device), "a GPU: these kernels do not run on a CPU")
    if query.dtype not in DTYPES:
        raise InvalidValue.of("query.dtype", str(query.dtype), "float32, bfloat16 or float16")
    check_like("query", query, (tokens, spec.heads.query, spec.heads.key_size), query.device)
    if query.stride(2) != 1:
        raise InvalidValue.of("query.stride", list(query.stride()), "one that ends in 1: heads lie dense in memory")
    if rows.kv_indices.dim() != 2 or rows.kv_indices.shape[0] != batch.requests or len(rows.firsts) != batch.requests:
        given = list(rows.kv_indices.shape), len(rows.firsts)
        raise InvalidValue.of("rows.kv_indices, firsts", given, f"both of {batch.requests} requests")
    check_like("positions", batch.positions, (tokens,), query.device)
    check_like("rows.kv_indices", rows.kv_indices, tuple(rows.kv_indices.shape), query.device)
    if rows.kv_indices.dtype != torch.int64:
        raise InvalidValue.of(
            "rows.kv_indices.dtype", str(rows.kv_indices.dtype), "int64: memory may have very many rows"
        )
    check_count("query: elements from the first to the last head", spec.heads.query * query.stride(1))
    farthest = max((past + new for past, new in zip(batch.contexts, batch.lengths, strict=True)), default=0)
    if farthest > FARTHEST:
        raise InvalidValue.of("contexts", farthest, f"at most {FARTHEST} tokens of a request")
    for name, weight in spec.weights.items():
        if name not in operands.parameters:
            raise InvalidValue.of("parameters", sorted(operands.parameters), f"with {name}, {list(weight)}")
        check_like(name, operands.parameters[name], weight, query.device)
    if not set(operands.requests) <= set(range(batch.requests)):
        raise InvalidValue.of("requests", list(operands.requests), f"numbers below {batch.requests}")


class Kept(NamedTuple):
    """The tensors of the cache by field, their form, and the dtype and device of the queries."""

    fields: Fields
    form: str
    dtype: torch.dtype
    device: torch.device


def memory_of(kept: Kept, name: str, heads: int, size: int) -> Memory:
    """The kernel argument for a cache field [row, heads, size], or [row, size] for one head.

    Raises `InvalidValue` for an unknown form, and for missing tensors or those of another shape, dtype or stride.
    """
    fields, form, dtype, device = kept
    shape = (heads, size)
    if form == "plain":
        return Memory(*strides(part(fields, name, shape, dtype, device)))
    if form == "int8":
        codes = part(fields, f"{name}.codes", shape, torch.int8, device)
        scale = part(fields, f"{name}.scale", (heads,), torch.float16, device)
        return Memory(*strides(codes), *strides(scale))
    if form == "int4":
        codes = part(fields, f"{name}.codes", (heads, size // 2), torch.uint8, device)
        groups = (heads, size // 32)
        step = part(fields, f"{name}.step", groups, torch.float16, device)
        low = part(fields, f"{name}.low", groups, torch.float16, device)
        if step.stride() != low.stride():
            raise InvalidValue.of(f"{name}.low.stride", low.stride(), f"{step.stride()}, as {name}.step")
        return Memory(*strides(codes), *strides(step), low)
    raise InvalidValue.of("rows.form", form, "plain, int8, int4")


def part(fields: object, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor [row, *shape] of a field; raises `InvalidValue` if it is missing, of another shape or dtype, or not
    contiguous along its last axis."""
    found = fields.get(name) if hasattr(fields, "get") else None
    if found is None:
        raise InvalidValue.of("rows.fields", sorted(fields), f"with {name}")  # type: ignore[call-overload]
    tensor: Tensor = found if found.dim() == len(shape) + 1 else found.unsqueeze(1)
    check_like(name, tensor, (tensor.shape[0], *shape), device)
    if tensor.dtype != dtype:
        raise InvalidValue.of(f"{name}.dtype", str(tensor.dtype), str(dtype))
    if len(shape) > 1 and tensor.stride(-1) != 1 and shape[-1] > 1:
        raise InvalidValue.of(f"{name}.stride", list(tensor.stride()), "one that ends in 1")
    return tensor


def strides(tensor: Tensor) -> tuple[Tensor, int, int]:
    """A tensor and its strides of rows and heads."""
    return tensor, tensor.stride(0), tensor.stride(1)


class Met(NamedTuple):
    """The cache that queries attend to: keys, their second part, values, and the size of the first part of keys."""

    key: Memory
    rest: Memory
    value: Memory
    first: int


class Asked(NamedTuple):
    """The operands of a paged attention call: spec, queries [token, head, size], form of the cache, output, positions
    [token] of the queries, cache, rule, and the launch parameters for small tiles, if not the default."""

    spec: AttentionSpec
    query: Tensor
    form: str
    out: Tensor
    positions: Tensor
    met: Met
    rule: Rule
    few: PagedChoice | None


def attend_rows(spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
    """The output [tokens, heads, value_size] in the dtype of the queries; raises `InvalidValue`, see `check`."""
    check(spec, operands)
    out = operands.query.new_empty(*operands.query.shape[:2], spec.heads.value_size)
    for launch in launches(spec, operands, out):
        launch.run(out.device)
    return out


def launches(
    spec: AttentionSpec, operands: PagedAttentionInputs, out: Tensor, few: PagedChoice | None = None
) -> list[Launch]:
    """The launches of a step in order; `few` are launch parameters for small tiles, None to look them up."""
    query, rows = operands.query, operands.rows
    kept = Kept(rows.fields, rows.form, query.dtype, query.device)
    asked = asked_for(spec, (query, operands.batch.positions, out), kept, operands.parameters, few)
    owners, sizes = spec.heads.key_value, (asked.met.first, spec.heads.value_size)
    group = spec.heads.query // owners
    most = many(query.dtype, group, *sizes)
    choice = asked.few or choice_of(FEW if group <= FEW else most, query.dtype, *sizes)
    # The partial results of a split of latents are as large as many of its keys, so the whole step is split evenly.
    wanted = choice.programs * processors(query.device) if "latent" in rows.fields else 0
    heads = Heads(group, owners, most, choice.times, wanted)
    work = prepared(operands, heads, band_before(spec).left, asked.met.key.data.shape[0])
    return portion_launches(asked, work.portions)


def asked_for(
    spec: AttentionSpec,
    tensors: tuple[Tensor, Tensor, Tensor],
    kept: Kept,
    parameters: Mapping[str, Tensor],
    few: PagedChoice | None = None,
) -> Asked:
    """Collect the operands of a call; `tensors` are queries, their positions, and the output."""
    query, positions, out = tensors
    met = met_of(spec, kept)
    sink, bias = sink_of(spec, query, parameters), bias_of(spec, parameters)
    rule = with_learned(rule_of(spec, query, band_before(spec)), sink, bias)
    if few is None and bias is None:
        few = measured_paged(query, kept.form, (met.first, spec.heads.value_size))
    return Asked(spec, query, kept.form, out, positions, met, rule, few)


def band_before(spec: AttentionSpec) -> Band:
    """The band of a causal mask or of a window that ends at the query; raises `InvalidValue` for other masks."""
    band = band_of(spec.mask)
    if band is None or band.right != 0:
        raise InvalidValue.of("mask", spec.mask.kind, "causal, or a window that ends at the query")
    return band


def portion_launches(asked: Asked, portions: Iterable[Portion]) -> list[Launch]:
    """The launches of all portions: for each the attention kernels, then the merge of their partial results."""
    found = []
    for portion in portions:
        attend = attend_launch(asked, portion)
        found += [attend, *(shared_launch(asked, attend, portion, shared) for shared in portion.shared)]
        if len(portion.merges):
            found.append(merge_launch(attend, portion))
    return found


def measured_paged(query: Tensor, form: str, sizes: tuple[int, int]) -> PagedChoice | None:
    """The measured launch parameters for small tiles over keys and values of these sizes, or None; quantized caches and
    32-bit elements are not tuned."""
    if form != "plain" or query.dtype.itemsize > 2:
        return None
    return known(PagedChoice, paged_name(max(NARROWEST, power_of_two(max(sizes)))), query.device)


def met_of(spec: AttentionSpec, kept: Kept) -> Met:
    """The kernel arguments for cached keys and values, or for latents and the rotary part of keys."""
    heads = spec.heads
    if "latent" in kept.fields:
        latent = memory_of(kept, "latent", 1, heads.value_size)
        rest = memory_of(kept, "rotary_key", 1, heads.key_size - heads.value_size)
        return Met(latent, rest, NO_MEMORY, heads.value_size)
    key = memory_of(kept, "key", heads.key_value, heads.key_size)
    return Met(key, NO_MEMORY, memory_of(kept, "value", heads.key_value, heads.value_size), heads.key_size)


def attend_launch(asked: Asked, portion: Portion) -> Launch:
    """The launch of the attention kernel for one portion."""
    spec, query, form, out, positions, met, rule, few = asked
    value_size = out.shape[2]
    rest = 0 if met.rest.data is None else spec.heads.key_size - met.first
    present = {
        BIASED: rule.bias is not None,
        TREE: portion.tables.seen is not None,
        INT4: form == INT4,
        INT8: form == INT8,
    }
    takes = [what for what, there in present.items() if there]
    choice = choice_of(portion.tile, query.dtype, met.first, value_size, takes=takes)
    # Parameters measured without these features may leave too few registers for them.
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
        positions=positions,
        items=portion.items,
        sums=sums,
        lse=torch.empty(portion.slots, portion.tile, dtype=torch.float32, device=out.device),
        heads=spec.heads.query,
        group=spec.heads.query // spec.heads.key_value,
        rule=rule,
        tile=tile,
        page=None if portion.tables.page is None else tl.constexpr(portion.tables.page),
    )
    programs = len(portion.items) * spec.heads.key_value
    return Launch(program=attend_paged, programs=programs, call=argument, warps=choice.warps, stages=choice.stages)


def shared_launch(asked: Asked, attend: Launch, portion: Portion, shared: Shared) -> Launch:
    """The launch over shared prefixes, which writes partial results into the buffers of the launch `attend`."""
    own: Paged = attend.call
    found = attend_launch(asked, Portion(shared.tile, shared.items, portion.merges, 0, portion.tables))
    call = found.call._replace(sums=own.sums, lse=own.lse, slots_of=shared.slots_of, slot_rows=own.tile.rows)
    return replace(found, call=call)


def merge_launch(attend: Launch, portion: Portion) -> Launch:
    """The launch that merges the partial results of the launch `attend`."""
    done: Paged = attend.call
    argument = Merge(done.out, portion.merges, done.sums, done.lse, done.heads, done.group, done.rule, done.tile)
    # One program per row: there may be few rows, which should be merged in parallel.
    programs = len(portion.merges) * (done.heads // done.group) * portion.tile
    return Launch(program=merge_paged, programs=programs, call=argument, warps=4, stages=2)
