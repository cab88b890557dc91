"""Attention under a sparse mask, computed in tiles of queries."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from attn_core import AttentionInputs, AttentionSpec, Mask
from torch import Tensor
from torch.nn.functional import pad

from attn_variants.compute.block_sparse.layout import parts
from attn_variants.compute.block_sparse.tiles import Layout, Tiles
from attn_variants.compute.pairs import nothing
from attn_variants.scores import scale_of


def attend(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size] in the dtype of the values.

    Queries are aligned to the last keys. If the mask depends on the number of keys and `key_padding_mask` is given,
    sequences of the same length are computed together.
    """
    if operands.key.shape[1] == 0 or operands.query.shape[0] == 0:
        return nothing(operands)
    if operands.key_padding_mask is None or not spec.mask.by_length:
        return by_heads(spec, spec.mask.over(operands.key.shape[1]), operands)
    out = nothing(operands)
    for length, rows in of_one_length(operands.key_padding_mask):
        some = {name: getattr(operands, name)[rows] for name in ("query", "key", "value", "key_padding_mask")}
        out = out.index_put((rows,), by_heads(spec, spec.mask.over(length), dataclasses.replace(operands, **some)))
    return out


def of_one_length(key_padding_mask: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each length, up to and including the last real key, and the sequences of that length; not length 0."""
    places = torch.arange(1, key_padding_mask.shape[1] + 1, device=key_padding_mask.device)
    lengths = (key_padding_mask * places).amax(1)
    for length in sorted(set(lengths.tolist()) - {0}):
        yield length, (lengths == length).nonzero()[:, 0]


def by_heads(spec: AttentionSpec, mask: Mask, operands: AttentionInputs) -> Tensor:
    """The output under a mask that is resolved for its length; heads with the same mask are computed together."""
    if mask.heads is None:
        return by_tiles(spec, mask, operands)
    alike: dict[Mask, list[int]] = defaultdict(list)
    for head in range(mask.heads):
        alike[mask.of_head(head)].append(head)
    out, order = [], []
    for own, heads in alike.items():
        out.append(by_tiles(spec, own, heads_of(spec, operands, heads)))
        order += heads
    places = torch.tensor(order).argsort()
    return torch.cat(out, dim=2).index_select(2, places)


def heads_of(spec: AttentionSpec, operands: AttentionInputs, heads: Sequence[int]) -> AttentionInputs:
    """The operands of some query heads, with keys and values repeated for each of them."""
    groups = torch.tensor([spec.heads.group_of[head] for head in heads])
    return dataclasses.replace(
        operands,
        query=operands.query.index_select(2, torch.tensor(heads)),
        key=operands.key.index_select(2, groups),
        value=operands.value.index_select(2, groups),
    )


def by_tiles(spec: AttentionSpec, mask: Mask, operands: AttentionInputs) -> Tensor:
    """The output under one mask for all heads; key/value heads are shared by equal consecutive groups."""
    rows = laid_out(operands)
    cut = parts(mask, operands.query.shape[1], operands.key.shape[1])
    layout = Layout(cut, scale_of(spec.score, operands.query.shape[-1]), operands.key_padding_mask)
    out: Tensor = Tiles.apply(*rows, layout)  # type: ignore[no-untyped-call]
    return as_given(out, operands)


def laid_out(operands: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the layout of `Tiles`, padded to the larger of the key and value sizes."""
    query, key, value = operands.query, operands.key, operands.value
    groups, size = key.shape[2], value.shape[-1]
    wide = max(query.shape[-1], size)
    rows = pad(query, (0, wide - query.shape[-1])).reshape(*query.shape[:2], groups, -1, wide)
    keys = pad(key, (0, wide - key.shape[-1])).transpose(1, 2).contiguous()
    values = pad(value, (0, wide - size)).transpose(1, 2).contiguous()
    return rows.permute(0, 2, 3, 1, 4).contiguous(), keys, values


def as_given(out: Tensor, operands: AttentionInputs) -> Tensor:
    """Convert the output of `Tiles` to [batch, query, heads, value_size]."""
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)[..., : operands.value.shape[-1]]
