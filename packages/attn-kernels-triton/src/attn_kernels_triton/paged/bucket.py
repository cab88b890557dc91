"""Steps in which each request of a bucket decodes one token, split on the device with a fixed grid and fixed pointers.

The length of splits depends on the contexts of all requests, so that programs have about equal work (like the plan of
FlashInfer, Ye et al. 2025, arXiv 2501.01005, section 3.3, but computed on the device). A CUDA graph that has captured a
step may be replayed with other lengths. Results are bitwise reproducible for the same lengths in the same bucket, but
not batch-invariant; `paged.schedule` splits each request on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton.language as tl
from attn_core import AttentionSpec, RaggedBatch
from attn_core.batch import Fields, StaticRows
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from torch import Tensor

from attn_kernels_triton.checks import check_like
from attn_kernels_triton.kernels.paged import LAID, Layout, lay_out
from attn_kernels_triton.launch import Launch, power_of_two, processors
from attn_kernels_triton.paged.attend import Kept, asked_for, band_before, portion_launches
from attn_kernels_triton.paged.schedule import Portion, Tables
from attn_kernels_triton.paged.tiles import FEW, choice_of, many

SHORTEST = 128
"""The smallest number of keys in a split."""


class Bucket(NamedTuple):
    """A step of up to `requests` requests, each with one token, whose heads of a group are `tiles` tiles of `tile`
    rows.

    There is `room` for the work items, each a tile and a split of its keys, whatever the lengths; about `wanted` of
    them result from splitting keys.
    """

    requests: int
    group: int
    owners: int
    tile: int
    wanted: int
    left: int | None

    @property
    def tiles(self) -> int:
        """The number of tiles of a token."""
        return -(-self.group // self.tile)

    @property
    def room(self) -> int:
        """The largest number of items per key/value head: the splits wanted, and one more for each tile."""
        return self.requests * self.tiles + self.wanted


def bucket_of(spec: AttentionSpec, requests: int, dtype: torch.dtype, device: torch.device) -> Bucket:
    """The bucket of up to `requests` requests on a device.

    Raises `InvalidValue` for masks other than causal ones and windows that end at the query.
    """
    owners = spec.heads.key_value
    group = spec.heads.query // owners
    # Latents have the size of values; otherwise keys may be wider.
    first = spec.heads.value_size if owners == 1 < group else spec.heads.key_size
    sizes = first, spec.heads.value_size
    tile = FEW if group <= FEW else many(dtype, group, *sizes)
    programs = choice_of(tile, dtype, *sizes).programs
    wanted = max(1, programs * processors(device) // owners)
    return Bucket(requests, group, owners, tile, wanted, band_before(spec).left)


@dataclass(frozen=True, eq=False)
class BucketWork:
    """Items and merges of a bucket on a device, int32, which `layout` fills for the lengths of a step."""

    bucket: Bucket
    items: Tensor
    merges: Tensor

    @classmethod
    def of(cls, bucket: Bucket, device: torch.device) -> BucketWork:
        """Empty work lists, to be filled by `layout`."""
        items = torch.zeros(bucket.room, 7, dtype=torch.int32, device=device)
        return cls(bucket, items, items.new_zeros(bucket.requests * bucket.tiles, 5))

    def layout(self, contexts: Tensor) -> Launch:
        """The launch that fills the lists; `contexts` [requests], int32 or int64, are the numbers of cached rows before
        each request's token, -1 if there is no request."""
        bucket = self.bucket
        check_like("contexts", contexts, (bucket.requests,), self.items.device)
        call = Layout(
            contexts=contexts,
            items=self.items,
            merges=self.merges,
            requests=bucket.requests,
            room=bucket.room,
            wanted=bucket.wanted,
            owners=bucket.owners,
            left=bucket.left,
            tiles=tl.constexpr(bucket.tiles),
            tile=tl.constexpr(bucket.tile),
            group=tl.constexpr(bucket.group),
            shortest=tl.constexpr(SHORTEST),
            tile_keys=tl.constexpr(FEW),
            width=tl.constexpr(power_of_two(bucket.requests)),
        )
        return Launch(program=lay_out, programs=-(-bucket.room // LAID.value), call=call, warps=4, stages=1)

    def portion(self, tables: Tables) -> Portion:
        """The work lists with tables of row or page numbers."""
        return Portion(self.bucket.tile, self.items, self.merges, self.bucket.room * self.bucket.owners, tables)


class DecodeStep(NamedTuple):
    """The tensors of a decode step: `query` [requests, heads, key_size], one token per request; the cache by field, in
    a form, see `attn_core.batch.RowsInPlace`; `pages` [requests, page], int32 or int64, the pages of `page` rows of
    each request, from position 0 on; `contexts` as for `BucketWork.layout`."""

    query: Tensor
    fields: Fields
    form: str
    pages: Tensor
    page: int
    contexts: Tensor
    parameters: Mapping[str, Tensor]


def decode_launches(spec: AttentionSpec, step: DecodeStep, work: BucketWork, out: Tensor) -> list[Launch]:
    """The launches that attend and merge for one layer; `work` must have been filled for `step.contexts`.

    Outputs [requests, heads, value_size] of absent requests are zeros. Raises `InvalidValue` for operands that the
    kernels do not support; the caller must make sure that page numbers are within the cache.
    """
    query, bucket = step.query, work.bucket
    check_like("query", query, (bucket.requests, spec.heads.query, spec.heads.key_size), query.device)
    check_like("pages", step.pages, (bucket.requests, step.pages.shape[-1]), query.device)
    if query.stride(2) != 1:
        raise InvalidValue.of("query.stride", list(query.stride()), "one that ends in 1: heads lie dense in memory")
    if step.page < 1 or step.page & (step.page - 1):
        raise InvalidValue.of("page", step.page, "a power of two")
    kept = Kept(step.fields, step.form, query.dtype, query.device)
    asked = asked_for(spec, (query, step.contexts, out), kept, step.parameters)
    return portion_launches(asked, [work.portion(Tables(step.pages, None, page=step.page))])


_WORK: WeakKeyDictionary[RaggedBatch, dict[Bucket, BucketWork]] = WeakKeyDictionary()
"""The work lists of live batches, which all layers of a model with the same heads and windows share."""


def attend_static(spec: AttentionSpec, operands: PagedAttentionInputs, rows: StaticRows) -> Tensor:
    """The output [requests, heads, value_size] of a step over `StaticRows`; raises what `decode_launches` raises.

    The first layer of a batch fills the work lists for all later layers.
    """
    query, device = operands.query, operands.query.device
    bucket = bucket_of(spec, query.shape[0], query.dtype, device)
    known = _WORK.setdefault(operands.batch, {})
    if bucket not in known:
        known[bucket] = BucketWork.of(bucket, device)
        known[bucket].layout(rows.contexts).run(device)
    tables = rows.kv_indices, rows.block_size, rows.contexts
    step = DecodeStep(query, rows.fields, rows.form, *tables, operands.parameters)
    out = query.new_empty(*query.shape[:2], spec.heads.value_size)
    for launch in decode_launches(spec, step, known[bucket], out):
        launch.run(device)
    return out
