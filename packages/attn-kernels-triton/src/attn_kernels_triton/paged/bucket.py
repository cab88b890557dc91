"""Steps in which each request of a bucket decodes one token, split on the device with a fixed grid and fixed pointers.

The length of splits depends on the contexts of all requests, so that programs have about equal work (like the plan of
FlashInfer, Ye et al. 2025, arXiv 2501.01005, section 3.3, but computed on the device). A CUDA graph that has captured a
step may be replayed with other lengths. Results are bitwise reproducible for the same lengths in the same bucket, but
not batch-invariant; `paged.schedule` splits each request on its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar
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
from attn_kernels_triton.paged.attend import CacheTensors, band_before, call_of, portion_launches
from attn_kernels_triton.paged.schedule import Portion, Tables
from attn_kernels_triton.paged.tiles import SMALL_TILE, choice_of, large_tile

SHORTEST = 128
"""The smallest number of keys in a split."""


@dataclass(frozen=True, kw_only=True)
class Bucket(ABC):
    """The bounds of a step: up to `requests` requests, and `group` query heads for each of `owners` key/value heads.

    Tiles have `tile` rows, tokens times a group of heads. About `wanted` work items (a tile and a split of its keys)
    result from splitting keys. A query sees `left` positions before itself, None for all.
    """

    requests: int
    group: int
    owners: int
    tile: int
    wanted: int
    left: int | None

    @property
    @abstractmethod
    def tiles(self) -> int:
        """The largest number of tiles per key/value head."""

    @property
    def room(self) -> int:
        """The largest number of items per key/value head: each tile has at most one split more than its share of those
        wanted."""
        return self.tiles + self.wanted

    @property
    def merges(self) -> int:
        """The largest number of tiles whose keys are split."""
        return self.tiles

    @property
    def slots(self) -> int:
        """The largest number of splits of these tiles."""
        return self.room


AnyBucket = TypeVar("AnyBucket", bound=Bucket)


@dataclass(frozen=True, eq=False)
class WorkLists(Generic[AnyBucket]):
    """Items and merges of a bucket on a device, int32, which the `layout` of a subclass fills for the lengths of a
    step."""

    bucket: AnyBucket
    items: Tensor
    merges: Tensor

    @classmethod
    def of(cls, bucket: AnyBucket, device: torch.device) -> Self:
        """Empty work lists, to be filled by `layout`."""
        items = torch.zeros(bucket.room, 7, dtype=torch.int32, device=device)
        return cls(bucket, items, items.new_zeros(bucket.merges, 5))

    def layout_launch(self, program: Any, argument: type[Any], block: int, fields: Mapping[str, Any]) -> Launch:
        """The launch of a kernel that fills the lists, `block` items per program; `fields` are those of its argument
        that differ between kernels."""
        bucket = self.bucket
        call = argument(
            items=self.items,
            merges=self.merges,
            requests=bucket.requests,
            room=bucket.room,
            wanted=bucket.wanted,
            owners=bucket.owners,
            left=bucket.left,
            tile=tl.constexpr(bucket.tile),
            group=tl.constexpr(bucket.group),
            shortest=tl.constexpr(SHORTEST),
            tile_keys=tl.constexpr(SMALL_TILE),
            width=tl.constexpr(power_of_two(bucket.requests)),
            **fields,
        )
        return Launch(program=program, programs=-(-bucket.room // block), call=call, warps=4, stages=1)

    def portion(self, tables: Tables) -> Portion:
        """The work lists with tables of page numbers."""
        return Portion(self.bucket.tile, self.items, self.merges, self.bucket.slots * self.bucket.owners, tables)


AnyWork = TypeVar("AnyWork", bound=WorkLists[Any])

_WORK: WeakKeyDictionary[RaggedBatch, dict[Bucket, Any]] = WeakKeyDictionary()
"""The work lists of live batches, which all layers of a model with the same heads and windows share."""


def work_of(
    operands: PagedAttentionInputs, bucket: Bucket, kind: type[AnyWork], layout: Callable[[AnyWork], Launch]
) -> AnyWork:
    """The work lists of a batch, which the launch `layout` fills for the first layer with this bucket."""
    known = _WORK.setdefault(operands.batch, {})
    if bucket not in known:
        known[bucket] = kind.of(bucket, operands.query.device)
        layout(known[bucket]).run(operands.query.device)
    found: AnyWork = known[bucket]
    return found


def check_step(spec: AttentionSpec, query: Tensor, tokens: int, page: tuple[str, int]) -> None:
    """Raise `InvalidValue` unless queries are [tokens, heads, key_size], with a contiguous last axis, and the page size
    is a power of two; `page` is the name and the value of its field."""
    check_like("query", query, (tokens, spec.heads.query, spec.heads.key_size), query.device)
    if query.stride(2) != 1:
        raise InvalidValue.of("query.stride", list(query.stride()), "one that ends in 1 (a contiguous last axis)")
    if page[1] < 1 or page[1] & (page[1] - 1):
        raise InvalidValue.of(*page, "a power of two")


@dataclass(frozen=True, kw_only=True)
class DecodeBucket(Bucket):
    """A step of requests with one token each, whose heads of a group are `token_tiles` tiles."""

    @property
    def token_tiles(self) -> int:
        """The number of tiles of a token."""
        return -(-self.group // self.tile)

    @property
    def tiles(self) -> int:
        """The number of tiles of all tokens."""
        return self.requests * self.token_tiles


def bucket_of(spec: AttentionSpec, requests: int, dtype: torch.dtype, device: torch.device) -> DecodeBucket:
    """The bucket of up to `requests` requests on a device.

    Raises `InvalidValue` for masks other than causal ones and windows that end at the query.
    """
    owners = spec.heads.key_value
    group = spec.heads.query // owners
    # Latents have the size of values; otherwise keys may be wider.
    first = spec.heads.value_size if owners == 1 < group else spec.heads.key_size
    sizes = first, spec.heads.value_size
    tile = SMALL_TILE if group <= SMALL_TILE else large_tile(dtype, group, *sizes)
    wanted = max(1, choice_of(tile, dtype, *sizes).programs * processors(device) // owners)
    left = band_before(spec).left
    return DecodeBucket(requests=requests, group=group, owners=owners, tile=tile, wanted=wanted, left=left)


class DecodeWork(WorkLists[DecodeBucket]):
    """The work lists of a decode step."""

    def layout(self, contexts: Tensor) -> Launch:
        """The launch that fills the lists; `contexts` [requests], int32 or int64, are the numbers of cached rows before
        each request's token, -1 if there is no request."""
        check_like("contexts", contexts, (self.bucket.requests,), self.items.device)
        fields = {"contexts": contexts, "tiles": tl.constexpr(self.bucket.token_tiles)}
        return self.layout_launch(lay_out, Layout, LAID.value, fields)


class DecodeStep(NamedTuple):
    """The tensors of a decode step: `query` [requests, heads, key_size], one token per request; the cache by field, in
    a form, see `attn_core.batch.RowsInPlace`; `pages` [requests, page], int32 or int64, the pages of `page` rows of
    each request, from position 0 on; `contexts` as for `DecodeWork.layout`."""

    query: Tensor
    fields: Fields
    form: str
    pages: Tensor
    page: int
    contexts: Tensor
    parameters: Mapping[str, Tensor]


def decode_launches(spec: AttentionSpec, step: DecodeStep, work: DecodeWork, out: Tensor) -> list[Launch]:
    """The launches that attend and merge for one layer; `work` must have been filled for `step.contexts`.

    Outputs [requests, heads, value_size] of absent requests are zeros. Raises `InvalidValue` for operands that the
    kernels do not support; the caller must make sure that page numbers are within the cache.
    """
    query, requests = step.query, work.bucket.requests
    check_step(spec, query, requests, ("page", step.page))
    check_like("pages", step.pages, (requests, step.pages.shape[-1]), query.device)
    cached = CacheTensors(step.fields, step.form, query.dtype, query.device)
    call = call_of(spec, (query, step.contexts, out), cached, step.parameters)
    return portion_launches(call, [work.portion(Tables(step.pages, None, page=step.page))])


def attend_static(spec: AttentionSpec, operands: PagedAttentionInputs, rows: StaticRows) -> Tensor:
    """The output [requests, heads, value_size] of a step over `StaticRows`; raises what `decode_launches` raises.

    The first layer of a batch fills the work lists for all later layers.
    """
    query, device = operands.query, operands.query.device
    bucket = bucket_of(spec, query.shape[0], query.dtype, device)
    work = work_of(operands, bucket, DecodeWork, lambda work: work.layout(rows.contexts))
    tables = rows.kv_indices, rows.block_size, rows.contexts
    step = DecodeStep(query, rows.fields, rows.form, *tables, operands.parameters)
    out = query.new_empty(*query.shape[:2], spec.heads.value_size)
    for launch in decode_launches(spec, step, work, out):
        launch.run(device)
    return out
