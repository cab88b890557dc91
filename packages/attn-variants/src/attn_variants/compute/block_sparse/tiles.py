"""Attention over tiles, forward and backward, by PyTorch's fused CPU kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attn_core.first_order import first_order_only
from torch import Tensor

from attn_variants.compute.block_sparse.layout import Bucket, Part
from attn_variants.compute.merging import merged

PIECE = 1 << 23
"""The largest number of elements of gathered keys that are held at once."""

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 -- the only one that gives lse
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


@dataclass(frozen=True, eq=False)
class Layout:
    """The tiles of one call, the scale of its scores, and `key_padding_mask` [batch, key], bool, or None."""

    parts: tuple[Part, ...]
    scale: float
    key_padding_mask: Tensor | None


class Tiles(torch.autograd.Function):
    """`apply(query, key, value, layout)`: query [batch, groups, group_size, query, size], key and value [batch, groups,
    key, size] -> [batch, groups, group_size, query, size]. Queries that see no key give zeros.

    Keys are gathered again in the backward pass, so only inputs, outputs and one number per query are saved.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
        """The outputs."""
        out, sums = outputs(query, key, value, layout)
        ctx.layout = layout
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of queries, keys and values."""
        return *gradients(gradient, ctx.saved_tensors, ctx.layout), None


def outputs(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The outputs, and the log-sum-exp of each query's scores, an arbitrary number if it sees no key."""
    out, sums = torch.zeros_like(query), query.new_zeros(query.shape[:-1], dtype=wider(query.dtype))
    for place, part in enumerate(layout.parts):
        found = attended((query, key, value), layout, part)
        out, sums = found if place == 0 else merged((out, sums), found)
    # For a query that sees no key any finite number works, as all its weights are zero.
    return out.to(query.dtype), sums.masked_fill(sums.isneginf(), 0.0)


def gradients(gradient: Tensor, saved: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; `saved` are these three and the results of `outputs`."""
    query, key, value, out, sums = saved
    to_query, to_key, to_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for piece in all_pieces(layout, key):
        found = BACKWARD(
            of_tiles(gradient, piece),
            of_tiles(query, piece),
            keys_of(key, piece),
            keys_of(value, piece),
            of_tiles(out, piece),
            of_tiles(sums[..., None], piece)[..., 0],
            0.0,
            False,  # noqa: FBT003 -- not causal: the mask says all; torch takes it by place
            attn_mask=spread(bias(piece, layout, query), piece, key),
            scale=layout.scale,
        )
        add(to_query, found[0], piece)
        add_keys(to_key, found[1], piece)
        add_keys(to_value, found[2], piece)
    return to_query, to_key, to_value


def attended(tensors: tuple[Tensor, Tensor, Tensor], layout: Layout, part: Part) -> tuple[Tensor, Tensor]:
    """The outputs of one part, in the dtype of the queries, and the log-sum-exps of its scores.

    Queries that see none of its keys get zeros and -inf.
    """
    query, key, value = tensors
    out = torch.zeros_like(query)
    sums = query.new_full(query.shape[:-1], float("-inf"), dtype=wider(query.dtype))
    for piece in pieces(part, key):
        added = bias(piece, layout, query)
        rows = of_tiles(query, piece)
        found, logs = FORWARD(
            rows,
            keys_of(key, piece),
            keys_of(value, piece),
            attn_mask=spread(added, piece, key),
            scale=layout.scale,
        )
        if added is not None:
            # torch returns 0 for a query that sees no key.
            logs = logs.masked_fill(added.amax(-1).isneginf(), float("-inf"))
        put(out, found, piece)
        put(sums[..., None], logs[..., None].to(sums.dtype), piece)
    return out, sums


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype, or float32 if it has fewer bits."""
    return torch.promote_types(dtype, torch.float32)


def all_pieces(layout: Layout, key: Tensor) -> Iterator[Bucket]:
    """Yield the pieces of all parts."""
    for part in layout.parts:
        yield from pieces(part, key)


def pieces(part: Part, key: Tensor) -> Iterator[Bucket]:
    """Yield the buckets of a part; those whose keys have to be gathered are split into pieces of bounded size."""
    for bucket in part:
        tiles, count = bucket.keys.shape
        most = max(1, PIECE // max(1, key.shape[0] * key.shape[1] * count * key.shape[-1]))
        if bucket.start is not None or tiles <= most:
            yield bucket
            continue
        for start in range(0, tiles, most):
            chosen = slice(start, start + most)
            shared = bucket.allowed is None or len(bucket.allowed) == 1
            allowed = bucket.allowed if shared else bucket.allowed[chosen]  # type: ignore[index]
            yield Bucket(bucket.queries[chosen], bucket.keys[chosen], allowed)


def of_tiles(rows: Tensor, bucket: Bucket) -> Tensor:
    """Gather rows [batch, groups, group_size, query, size] into [tiles, batch * groups, group_size * query, size]."""
    batch, groups, group_size, _, width = rows.shape
    tiles, count = bucket.queries.shape
    picked = rows.index_select(3, bucket.queries.flatten()).view(batch * groups, group_size, tiles, count, width)
    return picked.permute(2, 0, 1, 3, 4).reshape(tiles, batch * groups, group_size * count, width)


def put(into: Tensor, found: Tensor, bucket: Bucket) -> None:
    """Write `found` [tiles, batch * groups, group_size * query, size] to its rows of [batch, groups, group_size, query,
    size]."""
    into.index_copy_(3, bucket.queries.flatten(), rows_of(found, into, bucket))


def add(into: Tensor, found: Tensor, bucket: Bucket) -> None:
    """Add `found` [tiles, batch * groups, group_size * query, size] to its rows of [batch, groups, group_size, query,
    size]."""
    into.index_add_(3, bucket.queries.flatten(), rows_of(found, into, bucket))


def rows_of(found: Tensor, like: Tensor, bucket: Bucket) -> Tensor:
    """Reorder [tiles, batch * groups, group_size * query, size] to rows [batch, groups, group_size, tiles * query,
    size]."""
    batch, groups, group_size, _, width = like.shape
    tiles, count = bucket.queries.shape
    back = found.view(tiles, batch, groups, group_size, count, width).permute(1, 2, 3, 0, 4, 5)
    return back.reshape(batch, groups, group_size, tiles * count, width)


def keys_of(rows: Tensor, bucket: Bucket) -> Tensor:
    """Gather contiguous rows [batch, groups, key, size] into [tiles, batch * groups, key, size].

    A strided view, without a copy, if the tiles are evenly spaced.
    """
    batch, groups, length, width = rows.shape
    tiles, count = bucket.keys.shape
    if bucket.start is not None:
        shape = tiles, batch * groups, count, width
        steps = bucket.step * width, length * width, width, 1
        return rows.as_strided(shape, steps, rows.storage_offset() + bucket.start * width)
    flat = rows.view(batch * groups, length, width)
    return flat.index_select(1, bucket.keys.flatten()).view(batch * groups, tiles, count, width).transpose(0, 1)


def add_keys(into: Tensor, found: Tensor, bucket: Bucket) -> None:
    """Add `found` [tiles, batch * groups, key, size] to its rows of contiguous [batch, groups, key, size]."""
    batch, groups, length, width = into.shape
    moved = found.transpose(0, 1).reshape(batch * groups, -1, width)
    into.view(batch * groups, length, width).index_add_(1, bucket.keys.flatten(), moved)


def bias(bucket: Bucket, layout: Layout, query: Tensor) -> Tensor | None:
    """The mask as a bias of 0 or -inf, [tiles or 1, batch * groups or 1, group_size * query, key]; None if all pairs
    are allowed."""
    batch, groups, group_size = query.shape[:3]
    tiles, count = bucket.keys.shape
    allowed = bucket.allowed
    if layout.key_padding_mask is not None:
        kept = (
            layout.key_padding_mask.index_select(1, bucket.keys.flatten()).view(batch, tiles, 1, count).transpose(0, 1)
        )
        own = kept if allowed is None else kept & allowed[:, None]
        rows = own.expand(tiles, batch, bucket.queries.shape[1], count)[:, :, None]
        allowed = rows.expand(-1, -1, groups, -1, -1).reshape(tiles, batch * groups, -1, count)
    elif allowed is not None:
        allowed = allowed[:, None]
    if allowed is None:
        return None
    added = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill_(~allowed, float("-inf"))
    return added.repeat(1, 1, group_size, 1)


def spread(added: Tensor | None, bucket: Bucket, key: Tensor) -> Tensor | None:
    """Expand a bias to [tiles, batch * groups, group_size * query, key], for keys [batch, groups, ...]."""
    return None if added is None else added.expand(len(bucket.keys), key.shape[0] * key.shape[1], -1, -1)
