"""Steps with chunks of any lengths, up to a number of tokens, split on the device with a fixed grid and fixed pointers.

This is like `paged.bucket`, in which each request computes one token: splits are about equally long for all tiles of a
step, and results are bitwise reproducible for the same lengths in the same bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attn_core import AttentionSpec
from attn_core.batch import StaticMixedRows
from attn_core.kernels.attend import PagedAttentionInputs
from torch import Tensor

from attn_kernels_triton.checks import check_like
from attn_kernels_triton.kernels.paged_mixed import LAID, MixedLayout, lay_out_mixed
from attn_kernels_triton.launch import Launch, processors
from attn_kernels_triton.paged.attend import CacheTensors, band_before, call_of, portion_launches
from attn_kernels_triton.paged.bucket import Bucket, WorkLists, check_step, work_of
from attn_kernels_triton.paged.schedule import Tables
from attn_kernels_triton.paged.tiles import choice_of, large_tile


@dataclass(frozen=True, kw_only=True)
class MixedBucket(Bucket):
    """A step of up to `tokens` tokens of the requests, the last of which is padding."""

    tokens: int

    @property
    def tiles(self) -> int:
        """The largest number of tiles: full ones, and a partly filled one for each request with tokens."""
        return self.tokens * self.group // self.tile + min(self.requests, self.tokens)

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
    group = heads.query // heads.key_value
    tile = large_tile(dtype, group, heads.key_size, heads.value_size)
    programs = choice_of(tile, dtype, heads.key_size, heads.value_size).programs
    return MixedBucket(
        tokens=tokens,
        requests=requests,
        group=group,
        owners=heads.key_value,
        tile=tile,
        wanted=max(1, programs * processors(device) // heads.key_value),
        left=band_before(spec).left,
    )


class MixedWork(WorkLists[MixedBucket]):
    """The work lists of a step with chunks."""

    def layout(self, starts: Tensor, contexts: Tensor) -> Launch:
        """The launch that fills the lists; `starts` [requests + 1] and `contexts` [requests] as in
        `StaticMixedRows`."""
        bucket, device = self.bucket, self.items.device
        check_like("query_starts", starts, (bucket.requests + 1,), device)
        check_like("contexts", contexts, (bucket.requests,), device)
        fields = {"starts": starts, "contexts": contexts, "merged": bucket.merges}
        return self.layout_launch(lay_out_mixed, MixedLayout, LAID.value, fields)


def mixed_launches(
    spec: AttentionSpec, operands: PagedAttentionInputs, rows: StaticMixedRows, work: MixedWork, out: Tensor
) -> list[Launch]:
    """The launches that attend and merge for one layer; `work` must have been filled for the step.

    Outputs [tokens, heads, value_size] of padding are zeros. Raises `InvalidValue` for operands that the kernels do not
    support; the caller must make sure that page numbers are within the cache.
    """
    query, tokens = operands.query, work.bucket.tokens
    check_step(spec, query, tokens, ("block_size", rows.block_size))
    check_like("positions", operands.batch.positions, (tokens,), query.device)
    cached = CacheTensors(rows.fields, rows.form, query.dtype, query.device)
    call = call_of(spec, (query, operands.batch.positions, out), cached, operands.parameters)
    return portion_launches(call, [work.portion(Tables(rows.kv_indices, None, page=rows.block_size))])


def attend_mixed(spec: AttentionSpec, operands: PagedAttentionInputs, rows: StaticMixedRows) -> Tensor:
    """The output [tokens, heads, value_size] of a step over `StaticMixedRows`; raises what `mixed_launches` raises.

    The first layer of a batch fills the work lists for all later layers.
    """
    query, device = operands.query, operands.query.device
    bucket = mixed_bucket_of(spec, (query.shape[0], len(rows.contexts)), query.dtype, device)
    work = work_of(operands, bucket, MixedWork, lambda work: work.layout(rows.query_starts, rows.contexts))
    out = query.new_empty(*query.shape[:2], spec.heads.value_size)
    for launch in mixed_launches(spec, operands, rows, work, out):
        launch.run(device)
    return out
