"""Banded attention, for masks of bounded reach: the plain computation for one tile of queries at a time."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.kernels.attend import reach_of
from torch import Tensor
from torch.nn.functional import pad

from attn_variants.compute import plain


def attend(spec: AttentionSpec, operands: AttentionInputs, tile: int) -> Tensor:
    """The output [batch, query, heads, value_size] in the dtype of the values, for a mask of bounded reach.

    Queries are aligned to the last keys. Tiles of `tile` consecutive queries, or of all if there are fewer, become
    sequences of their own, each with the keys within the reach of any of its queries.
    """
    queries, reach = operands.query.shape[1], reach_of(spec.mask)
    # A compiled graph serves all lengths; if the length is known, tiles are not longer than it.
    if not torch.compiler.is_compiling():
        tile = max(1, min(tile, queries))
    if 0 in operands.key.shape[:2]:
        return plain.attend(spec, operands)
    cut = tiles(operands, tile, tile + reach - 1, spec.mask.lookback or 0)
    out = plain.attend(spec, cut)
    return torch.unflatten(out, 0, (operands.query.shape[0], -1)).flatten(1, 2)[:, :queries]


def tiles(operands: AttentionInputs, tile: int, span: int, back: int) -> AttentionInputs:
    """Cut the inputs into batch * tiles sequences of `tile` queries and `span` keys.

    The keys of a tile start `back` positions before its first query. Queries past the last are zeros; keys outside the
    sequence are masked.
    """
    batch, queries = operands.query.shape[:2]
    first = first_places(operands)
    count = (queries + tile - 1) // tile
    starts = first + torch.arange(count, device=first.device) * tile
    places = (starts[..., None] + torch.arange(tile, device=first.device)).expand(batch, -1, -1)
    wanted = (starts[..., None] + torch.arange(-back, span - back, device=first.device)).expand(batch, -1, -1)
    keys = operands.key.shape[1]
    there = wanted.clamp(0, keys - 1)
    key_padding_mask = wanted == there
    if operands.key_padding_mask is not None:
        key_padding_mask = key_padding_mask & operands.key_padding_mask.gather(1, there.flatten(1)).view_as(
            key_padding_mask
        )
    query = pad(operands.query, (0, 0, 0, 0, 0, count * tile - queries))
    return dataclasses.replace(
        operands,
        query=torch.unflatten(query, 1, (count, tile)).flatten(0, 1),
        key=picked(operands.key, there),
        value=picked(operands.value, there),
        query_positions=places.flatten(0, 1),
        key_positions=there.flatten(0, 1),
        key_padding_mask=key_padding_mask.flatten(0, 1),
    )


def first_places(operands: AttentionInputs) -> Tensor:
    """The position [batch or 1, 1] of the first query."""
    if operands.query_positions is not None:
        return operands.query_positions[:, :1]
    aligned = operands.key.shape[1] - operands.query.shape[1]
    return torch.zeros(1, 1, dtype=torch.int64, device=operands.query.device) + aligned


def picked(rows: Tensor, places: Tensor) -> Tensor:
    """Rows [batch * tiles, span, heads, size] at places [batch, tiles, span] of rows [batch, key, heads, size]."""
    batch, keys = rows.shape[:2]
    each = torch.arange(batch, device=rows.device)[:, None, None] * keys
    found = rows.flatten(0, 1).index_select(0, (places + each).flatten())
    return torch.unflatten(found, 0, (-1, places.shape[-1]))
