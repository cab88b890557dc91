"""Steps with chunks of any lengths, up to a number of tokens, split on the device with a fixed grid and fixed pointers.

This is like `paged.bucket`, in which each request computes one token: splits are about equally long for all tiles of a
step, and results are bitwise reproducible for the same lengths in the same bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton.language as tl
from attn_core import AttentionSpec, RaggedBatch
from attn_core.batch import StaticMixedRows
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from torch import Tensor

from attn_kernels_triton.checks import check_like
from attn_kernels_triton.kernels.paged_mixed import LAID, MixedLayout, lay_out_mixed
from attn_kernels_triton.launch import Launch, power_of_two, processors
from attn_kernels_triton.paged.attend import Kept, asked_for, band_before, portion_launches
from attn_kernels_triton.paged.bucket import SHORTEST
from attn_kernels_triton.paged.schedule import Portion, Tables
from attn_kernels_triton.paged.tiles import FEW, choice_of, many


class MixedBucket(NamedTuple):
    """A step of up to `tokens` tokens of `requests` requests, the last of which is padding.

    Its tiles have `tile` rows, tokens times a group of heads. There is `room` for the work items, each a tile and a
    split of its keys, whatever the lengths; about `wanted` of them result from splitting keys.
    """

    tokens: int
    requests: int
    group: int
    owners: int
    tile: int
    wanted: int
    left: int | None

    @property
    def tiles(self) -> int:
        """The largest number of tiles: full ones, and a partly filled one for each request with tokens."""
        return self.tokens * self.group // self.tile + min(self.requests, self.tokens)

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
        return 4 * self.wanted // 3 + 1


def mixed_bucket_of(
    spec: AttentionSpec, sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> MixedBucket:
    """The bucket of up to `sizes` (tokens, requests) on a device.

    Raises `InvalidValue` for masks other than causal ones and windows that end at the query.
    """
    (tokens, requests), heads = sizes, spec.heads
    owners = heads.key_value
    group = heads.query // owners
    tile = many(dtype, group, heads.key_size, heads.value_size)
    programs = choice_of(tile, dtype, heads.key_size, heads.value_size).programs
    wanted = max(1, programs * processors(device) // owners)
    return MixedBucket(tokens, requests, group, owners, tile, wanted, band_before(spec).left)


@dataclass(frozen=True, eq=False)
class MixedWork:
    """Items and merges of a bucket on a device, int32, which `layout` fills for the lengths of a step."""

    bucket: MixedBucket
    items: Tensor
    merges: Tensor

    @classmethod
    def of(cls, bucket: MixedBucket, device: torch.device) -> MixedWork:
        """Empty work lists, to be filled by `layout`."""
        items = torch.zeros(bucket.room, 7, dtype=torch.int32, device=device)
        return cls(bucket, items, items.new_zeros(bucket.merges, 5))

    def layout(self, starts: Tensor, contexts: Tensor) -> Launch:
        """The launch that fills the lists; `starts` [requests + 1] and `contexts` [requests] as in
        `StaticMixedRows`."""
        bucket, device = self.bucket, self.items.device
        check_like("query_starts", starts, (bucket.requests + 1,), device)
        check_like("contexts", contexts, (bucket.requests,), device)
        call = MixedLayout(
            starts=starts,
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
            group=tl.constexpr(bucket.group),
            shortest=tl.constexpr(SHORTEST),
            tile_keys=tl.constexpr(FEW),
            width=tl.constexpr(power_of_two(bucket.requests)),
        )
        return Launch(program=lay_out_mixed, programs=-(-bucket.room // LAID.value), call=call, warps=4, stages=1)

    def portion(self, tables: Tables) -> Portion:
        """The work lists with tables of page numbers."""
        return Portion(self.bucket.tile, self.items, self.merges, self.bucket.slots * self.bucket.owners, tables)


def mixed_launches(
    spec: AttentionSpec, operands: PagedAttentionInputs, rows: StaticMixedRows, work: MixedWork, out: Tensor
) -> list[Launch]:
    """The launches that attend and merge for one layer; `work` must have been filled for the step.

    Outputs [tokens, heads, value_size] of padding are zeros. Raises `InvalidValue` for operands that the kernels do not
    support; the caller must make sure that page numbers are within the cache.
    """
    query, bucket = operands.query, work.bucket
    check_like("query", query, (bucket.tokens, spec.heads.query, spec.heads.key_size), query.device)
    check_like("positions", operands.batch.positions, (bucket.tokens,), query.device)
    if query.stride(2) != 1:
        raise InvalidValue.of("query.stride", list(query.stride()), "one that ends in 1: heads lie dense in memory")
    if rows.block_size < 1 or rows.block_size & (rows.block_size - 1):
        raise InvalidValue.of("block_size", rows.block_size, "a power of two")
    kept = Kept(rows.fields, rows.form, query.dtype, query.device)
    asked = asked_for(spec, (query, operands.batch.positions, out), kept, operands.parameters)
    return portion_launches(asked, [work.portion(Tables(rows.kv_indices, None, page=rows.block_size))])


_WORK: WeakKeyDictionary[RaggedBatch, dict[MixedBucket, MixedWork]] = WeakKeyDictionary()
"""The work lists of live batches, which all layers of a model with the same heads and windows share."""


def attend_mixed(spec: AttentionSpec, operands: PagedAttentionInputs, rows: StaticMixedRows) -> Tensor:
    """The output [tokens, heads, value_size] of a step over `StaticMixedRows`; raises what `mixed_launches` raises.

    The first layer of a batch fills the work lists for all later layers.
    """
    query, device = operands.query, operands.query.device
    bucket = mixed_bucket_of(spec, (query.shape[0], len(rows.contexts)), query.dtype, device)
    known = _WORK.setdefault(operands.batch, {})
    if bucket not in known:
        known[bucket] = MixedWork.of(bucket, device)
        known[bucket].layout(rows.query_starts, rows.contexts).run(device)
    out = query.new_empty(*query.shape[:2], spec.heads.value_size)
    for launch in mixed_launches(spec, operands, rows, known[bucket], out):
        launch.run(device)
    return out
