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
from attn_kernels_triton.kernels.paged import NO_CACHE, CachedRows, Merge, Paged, PagedTile, attend_paged, merge_paged
from attn_kernels_triton.launch import Launch, power_of_two, processors
from attn_kernels_triton.machine import interpreted
from attn_kernels_triton.paged.host_plan import Portion, Shared, prepared
from attn_kernels_triton.paged.tiles import (
    BIASED,
    INT4,
    INT8,
    NARROWEST,
    SMALL_TILE,
    TREE,
    Heads,
    PagedChoice,
    choice_of,
    large_tile,
)
from attn_kernels_triton.tuning.candidates import paged_name
from attn_kernels_triton.tuning.store import known


def check(spec: AttentionSpec, operands: PagedAttentionInputs) -> None:
    """Raise `InvalidValue` for operands whose shapes, dtypes, devices, strides or sizes the kernels do not support.

    Row numbers are checked once per step, see `paged.host_plan.prepared`.
    """
    query, batch, rows = operands.query, operands.batch, operands.rows
    tokens = sum(batch.lengths)
    if query.device.type != "cuda" and not interpreted():
        raise InvalidValue.of("query.device", str(query.device), "a GPU: these kernels do not run on a CPU")
    if query.dtype not in DTYPES:
        raise InvalidValue.of("query.dtype", str(query.dtype), "float32, bfloat16 or float16")
    check_like("query", query, (tokens, spec.heads.query, spec.heads.key_size), query.device)
    if query.stride(2) != 1:
        raise InvalidValue.of("query.stride", list(query.stride()), "one that ends in 1 (a contiguous last axis)")
    if rows.kv_indices.dim() != 2 or rows.kv_indices.shape[0] != batch.requests or len(rows.firsts) != batch.requests:
        given = list(rows.kv_indices.shape), len(rows.firsts)
        raise InvalidValue.of("rows.kv_indices, firsts", given, f"one entry for each of {batch.requests} requests")
    check_like("positions", batch.positions, (tokens,), query.device)
    check_like("rows.kv_indices", rows.kv_indices, tuple(rows.kv_indices.shape), query.device)
    if rows.kv_indices.dtype != torch.int64:
        raise InvalidValue.of("rows.kv_indices.dtype", str(rows.kv_indices.dtype), "int64")
    check_count("query: elements from the first to the last head", spec.heads.query * query.stride(1))
    farthest = max((past + new for past, new in zip(batch.contexts, batch.lengths, strict=True)), default=0)
    if farthest > FARTHEST:
        raise InvalidValue.of("contexts", farthest, f"at most {FARTHEST} tokens per request")
    for name, weight in spec.weights.items():
        if name not in operands.parameters:
            raise InvalidValue.of(
                "parameters", sorted(operands.parameters), f"a mapping with {name} of shape {list(weight)}"
            )
        check_like(name, operands.parameters[name], weight, query.device)
    if not set(operands.requests) <= set(range(batch.requests)):
        raise InvalidValue.of("requests", list(operands.requests), f"request numbers below {batch.requests}")


class CacheTensors(NamedTuple):
    """The tensors of the cache by field, their form, and the dtype and device of the queries."""

    fields: Fields
    form: str
    dtype: torch.dtype
    device: torch.device


def argument_of(cached: CacheTensors, name: str, heads: int, size: int) -> CachedRows:
    """The kernel argument for a cache field [row, heads, size], or [row, size] for one head.

    Raises `InvalidValue` for an unknown form, and for missing tensors or those of another shape, dtype or stride.
    """
    fields, form, dtype, device = cached
    shape = (heads, size)
    if form == "plain":
        return CachedRows(*strides(part(fields, name, shape, dtype, device)))
    if form == "int8":
        codes = part(fields, f"{name}.codes", shape, torch.int8, device)
        scale = part(fields, f"{name}.scale", (heads,), torch.float16, device)
        return CachedRows(*strides(codes), *strides(scale))
    if form == "int4":
        codes = part(fields, f"{name}.codes", (heads, size // 2), torch.uint8, device)
        groups = (heads, size // 32)
        step = part(fields, f"{name}.step", groups, torch.float16, device)
        low = part(fields, f"{name}.low", groups, torch.float16, device)
        if step.stride() != low.stride():
            raise InvalidValue.of(f"{name}.low.stride", low.stride(), f"{step.stride()}, the strides of {name}.step")
        return CachedRows(*strides(codes), *strides(step), low)
    raise InvalidValue.of("rows.form", form, "plain, int8, int4")


def part(fields: object, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor [row, *shape] of a field; raises `InvalidValue` if it is missing, of another shape or dtype, or not
    contiguous along its last axis."""
    found = fields.get(name) if hasattr(fields, "get") else None
    if found is None:
        raise InvalidValue.of("rows.fields", sorted(fields), f"fields that include {name}")  # type: ignore[call-overload]
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


class CacheArguments(NamedTuple):
    """The cache that queries attend to: keys, their second part, values, and the size of the first part of keys."""

    key: CachedRows
    rest: CachedRows
    value: CachedRows
    first: int


class PagedCall(NamedTuple):
    """The operands of a paged attention call: spec, queries [token, head, size], form of the cache, output, positions
    [token] of the queries, cache, rule, and the launch parameters for small tiles, if not the default."""

    spec: AttentionSpec
    query: Tensor
    form: str
    out: Tensor
    positions: Tensor
    cache: CacheArguments
    rule: Rule
    small: PagedChoice | None


def attend_rows(spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
    """The output [tokens, heads, value_size] in the dtype of the queries; raises `InvalidValue`, see `check`."""
    check(spec, operands)
    out = operands.query.new_empty(*operands.query.shape[:2], spec.heads.value_size)
    for launch in launches(spec, operands, out):
        launch.run(out.device)
    return out


def launches(
    spec: AttentionSpec, operands: PagedAttentionInputs, out: Tensor, small: PagedChoice | None = None
) -> list[Launch]:
    """The launches of a step in order; `small` are launch parameters for small tiles, None to look them up."""
    query, rows = operands.query, operands.rows
    cached = CacheTensors(rows.fields, rows.form, query.dtype, query.device)
    call = call_of(spec, (query, operands.batch.positions, out), cached, operands.parameters, small)
    owners, sizes = spec.heads.key_value, (call.cache.first, spec.heads.value_size)
    group = spec.heads.query // owners
    large = large_tile(query.dtype, group, *sizes)
    choice = call.small or choice_of(SMALL_TILE if group <= SMALL_TILE else large, query.dtype, *sizes)
    # The partial results of a split of latents are as large as many of its keys, so the whole step is split evenly.
    wanted = choice.programs * processors(query.device) if "latent" in rows.fields else 0
    heads = Heads(group, owners, large, choice.times, wanted)
    work = prepared(operands, heads, band_before(spec).left, call.cache.key.data.shape[0])
    return portion_launches(call, work.portions)


def call_of(
    spec: AttentionSpec,
    tensors: tuple[Tensor, Tensor, Tensor],
    cached: CacheTensors,
    parameters: Mapping[str, Tensor],
    small: PagedChoice | None = None,
) -> PagedCall:
    """Collect the operands of a call; `tensors` are queries, their positions, and the output."""
    query, positions, out = tensors
    cache = cache_of(spec, cached)
    sink, bias = sink_of(spec, query, parameters), bias_of(spec, parameters)
    rule = with_learned(rule_of(spec, query, band_before(spec)), sink, bias)
    if small is None and bias is None:
        small = measured_paged(query, cached.form, (cache.first, spec.heads.value_size))
    return PagedCall(spec, query, cached.form, out, positions, cache, rule, small)


def band_before(spec: AttentionSpec) -> Band:
    """The band of a causal mask or of a window that ends at the query; raises `InvalidValue` for other masks."""
    band = band_of(spec.mask)
    if band is None or band.right != 0:
        raise InvalidValue.of("mask", spec.mask.kind, "causal, or a window that ends at the query")
    return band


def portion_launches(call: PagedCall, portions: Iterable[Portion]) -> list[Launch]:
    """The launches of all portions: for each the attention kernels, then the merge of their partial results."""
    found = []
    for portion in portions:
        attend = attend_launch(call, portion)
        found += [attend, *(shared_launch(call, attend, portion, shared) for shared in portion.shared)]
        if len(portion.merges):
            found.append(merge_launch(attend, portion))
    return found


def measured_paged(query: Tensor, form: str, sizes: tuple[int, int]) -> PagedChoice | None:
    """The measured launch parameters for small tiles over keys and values of these sizes, or None; quantized caches and
    32-bit elements are not tuned."""
    if form != "plain" or query.dtype.itemsize > 2:
        return None
    return known(PagedChoice, paged_name(max(NARROWEST, power_of_two(max(sizes)))), query.device)


def cache_of(spec: AttentionSpec, cached: CacheTensors) -> CacheArguments:
    """The kernel arguments for cached keys and values, or for latents and the rotary part of keys."""
    heads = spec.heads
    if "latent" in cached.fields:
        latent = argument_of(cached, "latent", 1, heads.value_size)
        rest = argument_of(cached, "rotary_key", 1, heads.key_size - heads.value_size)
        return CacheArguments(latent, rest, NO_CACHE, heads.value_size)
    key = argument_of(cached, "key", heads.key_value, heads.key_size)
    return CacheArguments(
        key, NO_CACHE, argument_of(cached, "value", heads.key_value, heads.value_size), heads.key_size
    )


def attend_launch(call: PagedCall, portion: Portion) -> Launch:
    """The launch of the attention kernel for one portion."""
    spec, query, form, out, positions, cache, rule, small = call
    value_size = out.shape[2]
    rest = 0 if cache.rest.data is None else spec.heads.key_size - cache.first
    present = {
        BIASED: rule.bias is not None,
        TREE: portion.tables.seen is not None,
        INT4: form == INT4,
        INT8: form == INT8,
    }
    takes = [what for what, there in present.items() if there]
    choice = choice_of(portion.tile, query.dtype, cache.first, value_size, takes=takes)
    # Parameters measured without these features may leave too few registers for them.
    if small is not None and portion.tile == SMALL_TILE and not takes:
        choice = small
    sizes = (cache.first, value_size, rest)
    tile = PagedTile(*map(tl.constexpr, (portion.tile, choice.keys, *sizes, *map(power_of_two, sizes))))
    sums = torch.empty(portion.slots, portion.tile, power_of_two(value_size), dtype=torch.float32, device=out.device)
    argument = Paged(
        query=Rows(query, 0, query.stride(0), query.stride(1)),
        key=cache.key,
        rest=cache.rest,
        value=cache.value,
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


def shared_launch(call: PagedCall, attend: Launch, portion: Portion, shared: Shared) -> Launch:
    """The launch over shared prefixes, which writes partial results into the buffers of the launch `attend`."""
    own: Paged = attend.call
    found = attend_launch(call, Portion(shared.tile, shared.items, portion.merges, 0, portion.tables))
    argument = found.call._replace(sums=own.sums, lse=own.lse, slots_of=shared.slots_of, slot_rows=own.tile.rows)
    return replace(found, call=argument)


def merge_launch(attend: Launch, portion: Portion) -> Launch:
    """The launch that merges the partial results of the launch `attend`."""
    done: Paged = attend.call
    argument = Merge(done.out, portion.merges, done.sums, done.lse, done.heads, done.group, done.rule, done.tile)
    # One program per row: there may be few rows, which should be merged in parallel.
    programs = len(portion.merges) * (done.heads // done.group) * portion.tile
    return Launch(program=merge_paged, programs=programs, call=argument, warps=4, stages=2)
