"""Steps that are recorded once and replayed, split on the device with a fixed grid and fixed pointers.

The length of splits depends on the lengths of all requests, so that programs have about equal work (like the plan of
FlashInfer, Ye et al. 2025, arXiv 2501.01005, section 3.3, but computed on the device). A CUDA graph that has captured a
step may be replayed with other lengths. Results are bitwise reproducible for the same lengths in the same bucket, but
not batch-invariant; `paged.host_plan` splits each request on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from weakref import WeakKeyDictionary

import torch
import triton.language as tl
from attn_core import AttentionSpec, RaggedBatch
from attn_core.batch import StaticRows
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from torch import Tensor

from attn_kernels_triton.checks import check_like
from attn_kernels_triton.kernels.paged_schedule import ITEMS, Schedule, schedule_step
from attn_kernels_triton.launch import Launch, power_of_two, processors
from attn_kernels_triton.paged.attend import CacheTensors, band_before, call_of, portion_launches
from attn_kernels_triton.paged.host_plan import Portion, Tables
from attn_kernels_triton.paged.tiles import SMALL_TILE, choice_of, large_tile

SHORTEST = 128
"""The smallest number of keys in a split."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The bounds of a step: up to `tokens` tokens of up to `requests` requests, the last of which is padding, and
    `group` query heads for each of `owners` key/value heads.

    Tiles have `tile` rows, tokens times a group of heads, of up to `tile_tokens` tokens. About `wanted` work items (a
    tile and a split of its keys) result from splitting keys. A query sees `left` positions before itself, None for all.
    """

    tokens: int
    requests: int
    group: int
    owners: int
    tile: int
    tile_tokens: int
    wanted: int
    left: int | None

    @property
    def tiles(self) -> int:
        """The largest number of tiles per key/value head: those of tokens one by one, or full ones and a partly filled
        one for each request."""
        return min(self.tokens * -(-self.group // self.tile), self.tokens * self.group // self.tile + self.requests)

    @property
    def room(self) -> int:
        """The largest number of items per key/value head: each tile has at most one split more than its share of those
        wanted."""
        return self.tiles + self.wanted

    @property
    def merges(self) -> int:
        """The largest number of tiles whose keys are split: each has keys for at least one and a half splits."""
        return min(self.tiles, 2 * self.wanted // 3 + 1)

    @property
    def slots(self) -> int:
        """The largest number of splits of these tiles: by rounding, at most four for the length of three."""
        return min(self.room, 4 * self.wanted // 3 + 1)


def bucket_of(spec: AttentionSpec, query: Tensor, rows: StaticRows) -> Bucket:
    """The bucket of a step of these queries on their device.

    Raises `InvalidValue` for masks other than causal ones and windows that end at the query.
    """
    heads, dtype = spec.heads, query.dtype
    group = heads.query // heads.key_value
    sizes = heads.value_size if "latent" in rows.fields else heads.key_size, heads.value_size
    tile = SMALL_TILE if group * rows.max_query_len <= SMALL_TILE else large_tile(dtype, group, *sizes)
    return Bucket(
        tokens=query.shape[0],
        requests=len(rows.contexts),
        group=group,
        owners=heads.key_value,
        tile=tile,
        tile_tokens=min(rows.max_query_len, -(-tile // group) + 1),
        wanted=max(1, choice_of(tile, dtype, *sizes).programs * processors(query.device) // heads.key_value),
        left=band_before(spec).left,
    )


@dataclass(frozen=True, eq=False)
class WorkLists:
    """Items and merges of a bucket on a device, int32, which `layout` fills for the lengths of a step."""

    bucket: Bucket
    items: Tensor
    merges: Tensor

    @classmethod
    def of(cls, bucket: Bucket, device: torch.device) -> Self:
        """Empty work lists, to be filled by `layout`."""
        items = torch.zeros(bucket.room, 7, dtype=torch.int32, device=device)
        return cls(bucket, items, items.new_zeros(bucket.merges, 5))

    def layout(self, query_starts: Tensor, contexts: Tensor) -> Launch:
        """The launch that fills the lists; `query_starts` [requests + 1] and `contexts` [requests] as in
        `StaticRows`."""
        bucket, device = self.bucket, self.items.device
        check_like("query_starts", query_starts, (bucket.requests + 1,), device)
        check_like("contexts", contexts, (bucket.requests,), device)
        call = Schedule(
            starts=query_starts,
            contexts=contexts,
            items=self.items,
            merges=self.merges,
            requests=bucket.requests,
            room=bucket.room,
            merged=bucket.merges,
            wanted=bucket.wanted,
            owners=bucket.owners,
            left=bucket.left,
            tile=tl.constexpr(bucket.tile),
            tile_tokens=tl.constexpr(bucket.tile_tokens),
            group=tl.constexpr(bucket.group),
            shortest=tl.constexpr(SHORTEST),
            tile_keys=tl.constexpr(SMALL_TILE),
            width=tl.constexpr(power_of_two(bucket.requests)),
        )
        return Launch(program=schedule_step, programs=-(-bucket.room // ITEMS.value), call=call, warps=4, stages=1)


_WORK: WeakKeyDictionary[RaggedBatch, dict[Bucket, WorkLists]] = WeakKeyDictionary()
"""The work lists of live batches, which all layers of a model with the same heads and windows share."""


def launches(
    spec: AttentionSpec, operands: PagedAttentionInputs, rows: StaticRows, work: WorkLists, out: Tensor
) -> list[Launch]:
    """The launches that attend and merge for one layer; `work` must have been filled for the step.

    Outputs [tokens, heads, value_size] of padding are zeros. Raises `InvalidValue` for operands that the kernels do not
    support; the caller must make sure that page numbers are within the cache.
    """
    query, positions, (tokens, page) = operands.query, operands.batch.positions, (work.bucket.tokens, rows.block_size)
    check_like("query", query, (tokens, spec.heads.query, spec.heads.key_size), query.device)
    if query.stride(2) != 1:
        raise InvalidValue.of("query.stride", list(query.stride()), "one that ends in 1 (a contiguous last axis)")
    check_like("positions", positions, (tokens,), query.device)
    check_like("kv_indices", rows.kv_indices, (work.bucket.requests - 1, rows.kv_indices.shape[-1]), query.device)
    if page < 1 or page & (page - 1):
        raise InvalidValue.of("block_size", page, "a power of two")
    cached = CacheTensors(rows.fields, rows.form, query.dtype, query.device)
    call = call_of(spec, (query, positions, out), cached, operands.parameters)
    slots, tables = work.bucket.slots * work.bucket.owners, Tables(rows.kv_indices, None, page=page)
    return portion_launches(call, [Portion(work.bucket.tile, work.items, work.merges, slots, tables)])


def attend_step(spec: AttentionSpec, operands: PagedAttentionInputs, rows: StaticRows) -> Tensor:
    """The output [tokens, heads, value_size] of a step over `StaticRows`; raises what `launches` raises.

    The first layer of a batch with a bucket fills the work lists for all later layers.
    """
    query, device = operands.query, operands.query.device
    bucket, known = bucket_of(spec, query, rows), _WORK.setdefault(operands.batch, {})
    if bucket not in known:
        known[bucket] = WorkLists.of(bucket, device)
        known[bucket].layout(rows.query_starts, rows.contexts).run(device)
    out = query.new_empty(*query.shape[:2], spec.heads.value_size)
    for launch in launches(spec, operands, rows, known[bucket], out):
        launch.run(device)
    return out
