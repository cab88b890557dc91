"""Attention of static decode steps (`attn_core.batch.StaticRows`): launches depend on the number of requests alone."""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from attn_core import AttentionSpec
from attn_core.batch import StaticRows
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from attn_core.masks import band_of
from torch import Tensor

from attn_kernels_triton.attention.plan import bias_of, rule_of, sink_of, with_learned
from attn_kernels_triton.checks import check_like
from attn_kernels_triton.kernels.arguments import Rows, Rule
from attn_kernels_triton.kernels.paged import Paged, PagedTile
from attn_kernels_triton.kernels.paged_decode import decode_paged, merge_decode
from attn_kernels_triton.launch import Launch, power_of_two
from attn_kernels_triton.paged.attend import Met, check_query, measured_paged, met_of
from attn_kernels_triton.paged.schedule import FEW
from attn_kernels_triton.paged.tiles import BIASED, INT4, PagedChoice, choice_of, many

MOST_SPLITS = 32
"""More would leave too much to merge."""
WAVES = 2
"""Programs for each multiprocessor that requests are cut for."""
INTERPRETED_MULTIPROCESSORS = 8


def decode_rows(spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
    """The output [requests, heads, value_size] in the type of the queries; raises `InvalidValue`, see `memory_of`."""
    out = operands.query.new_empty(*operands.query.shape[:2], spec.heads.value_size)
    for launch in decode_launches(spec, operands, out):
        launch.run(out.device)
    return out


def decode_launches(spec: AttentionSpec, operands: PagedAttentionInputs, out: Tensor) -> list[Launch]:
    """The program that meets rows, and where requests are cut, that which merges."""
    rows, band = operands.rows, band_of(spec.mask)
    if not isinstance(rows, StaticRows):
        raise InvalidValue.of("rows", type(rows).__name__, "StaticRows")
    if band is None or band.right != 0:
        raise InvalidValue.of("mask", spec.mask.kind, "causal, or a window that ends at the query")
    check_query(spec, operands)
    check_static(rows, operands.query)
    met = met_of(spec, operands)
    sink, bias = sink_of(spec, operands.query, operands.parameters), bias_of(spec, operands.parameters)
    rule = with_learned(rule_of(spec, operands.query, band), sink, bias)
    choice, tile = tile_of(spec, operands, met, rule)
    requests, owners = out.shape[0], spec.heads.key_value
    group = spec.heads.query // owners
    programs = requests * owners * -(-group // tile.rows.value)
    splits = splits_of(programs, rows.kv_indices.shape[1] * rows.block_size // choice.keys, out.device)
    parts = programs * splits if splits > 1 else 0
    size = (parts, tile.rows.value)
    call = Paged(
        query=Rows(operands.query, 0, operands.query.stride(0), operands.query.stride(1)),
        key=met.key,
        rest=met.rest,
        value=met.value,
        out=Rows(out, 0, out.stride(0), out.stride(1)),
        numbers=rows.kv_indices,
        stride=rows.kv_indices.stride(0),
        firsts=rows.starts,
        bases=None,
        seen=None,
        words=None,
        positions=operands.batch.positions,
        items=None,
        sums=torch.empty(*size, tile.value_width.value, dtype=torch.float32, device=out.device),
        lse=torch.empty(size, dtype=torch.float32, device=out.device),
        heads=spec.heads.query,
        group=group,
        rule=rule,
        tile=tile,
        block=tl.constexpr(rows.block_size),
        ends=rows.ends,
        splits=tl.constexpr(splits),
    )
    warps, stages = choice.warps, choice.stages
    found = [Launch(program=decode_paged, programs=programs * splits, call=call, warps=warps, stages=stages)]
    if splits > 1:
        warps = max(4, tile.rows.value * tile.value_width.value // 2048)
        found.append(Launch(program=merge_decode, programs=programs, call=call, warps=warps, stages=2))
    return found


def tile_of(spec: AttentionSpec, operands: PagedAttentionInputs, met: Met, rule: Rule) -> tuple[PagedChoice, PagedTile]:
    """The tile of the heads that share keys."""
    dtype, value_size = operands.query.dtype, spec.heads.value_size
    sizes = met.first, value_size
    group = spec.heads.query // spec.heads.key_value
    rows = FEW if group <= FEW else many(dtype, *sizes)
    present = {BIASED: rule.bias is not None, INT4: operands.rows.form == INT4}
    takes = [what for what, there in present.items() if there]
    choice = choice_of(rows, dtype, *sizes, takes=takes)
    if rows == FEW and not takes:
        choice = measured_paged(operands.query, operands.rows.form, sizes) or choice
    rest = 0 if met.rest.data is None else spec.heads.key_size - met.first
    widths = (met.first, value_size, rest)
    return choice, PagedTile(*map(tl.constexpr, (rows, choice.keys, *widths, *map(power_of_two, widths))))


def splits_of(programs: int, most: int, device: torch.device) -> int:
    """Into how many parts, a power of two, requests are cut so that all multiprocessors are busy."""
    wanted = WAVES * multiprocessors(device)
    splits = 1
    while splits < MOST_SPLITS and splits * 2 <= most and programs * splits * 2 <= wanted:
        splits *= 2
    return splits


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def check_static(rows: StaticRows, query: Tensor) -> None:
    """Raise `InvalidValue` for tables that the programs would misread."""
    requests = len(query)
    check_like("rows.kv_indices", rows.kv_indices, (requests, rows.kv_indices.shape[1]), query.device)
    if rows.kv_indices.dtype != torch.int32 or rows.kv_indices.stride(1) != 1:
        raise InvalidValue.of("rows.kv_indices", str(rows.kv_indices.dtype), "dense int32 numbers of blocks")
    for name, tensor in (("starts", rows.starts), ("ends", rows.ends)):
        check_like(f"rows.{name}", tensor, (requests,), query.device)
        if tensor.dtype != torch.int64:
            raise InvalidValue.of(f"rows.{name}", str(tensor.dtype), "int64")
