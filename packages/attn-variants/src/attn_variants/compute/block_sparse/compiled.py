"""Block-sparse attention as operators that torch.compile does not trace: tiles are cut in each call, at known lengths.

Graphs refer to a mask by a digest of its contents, so that a graph from torch's cache on disk has the same meaning in
another process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, Mask
from attn_core.first_order import first_order_only
from torch import Tensor

from attn_variants.compute.block_sparse.attend import as_given, heads_of, laid_out, of_one_length
from attn_variants.compute.block_sparse.layout import parts
from attn_variants.compute.block_sparse.tiles import Layout, gradients, outputs, wider
from attn_variants.scores import scale_of

MASKS: dict[str, Mask] = {}
"""The masks that graphs of this process refer to, by name."""


def named(mask: Mask) -> str:
    """Register a mask for use in graphs; returns its name, or the names for all heads, separated by spaces."""
    heads = [mask] if mask.heads is None else [mask.of_head(head) for head in range(mask.heads)]
    names = []
    for own in heads:
        name = hashlib.sha256(repr(own).encode()).hexdigest()
        MASKS[name] = own
        names.append(name)
    return " ".join(names)


def attend(spec: AttentionSpec, names: str, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size] under the masks of these `names`, as returned by `named`."""
    alike: dict[str, list[int]] = {}
    for head, name in enumerate(names.split(" ")):
        alike.setdefault(name, []).append(head)
    scale = scale_of(spec.score, operands.query.shape[-1])
    if spec.mask.heads is None:
        return as_given(tiles(*laid_out(operands), operands.key_padding_mask, names, scale)[0], operands)
    out, order = [], []
    for name, heads in alike.items():
        own = heads_of(spec, operands, heads)
        out.append(as_given(tiles(*laid_out(own), own.key_padding_mask, name, scale)[0], own))
        order += heads
    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(out, dim=2).index_select(2, torch.tensor(places))


@torch.library.custom_op("attn_variants::tiles", mutates_args=())
def tiles(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, mask: str, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps; the arguments are those of `Tiles`, with the padding, name of the mask, and scale."""
    out, sums = torch.zeros_like(query), query.new_zeros(query.shape[:-1], dtype=wider(query.dtype))
    for rows, layout in layouts(mask, scale, (query.shape[3], key.shape[2]), key_padding_mask):
        out[rows], sums[rows] = outputs(query[rows], key[rows], value[rows], layout)
    return out, sums


@torch.library.custom_op("attn_variants::tiles_backward", mutates_args=())
def tiles_backward(
    gradient: Tensor, saved: list[Tensor], key_padding_mask: Tensor | None, mask: str, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; see `gradients`."""
    found = torch.zeros_like(saved[0]), torch.zeros_like(saved[1]), torch.zeros_like(saved[2])
    for rows, layout in layouts(mask, scale, (saved[0].shape[3], saved[1].shape[2]), key_padding_mask):
        parts_of = gradients(gradient[rows], [part[rows] for part in saved], layout)
        for whole, part in zip(found, parts_of, strict=True):
            whole[rows] = part
    return found


def layouts(
    mask: str, scale: float, lengths: tuple[int, int], key_padding_mask: Tensor | None
) -> Iterator[tuple[slice | Tensor, Layout]]:
    """Yield sequences and their layout: all at once or, if the mask depends on lengths, those of each length."""
    own = MASKS[mask]
    if key_padding_mask is None or not own.by_length:
        yield slice(None), Layout(parts(own, *lengths), scale, key_padding_mask)
        return
    for length, rows in of_one_length(key_padding_mask):
        yield rows, Layout(parts(own.over(length), *lengths), scale, key_padding_mask[rows])


@tiles.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=wider(query.dtype))


@tiles_backward.register_fake
def _(_gradient: Tensor, saved: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(saved[0]), torch.empty_like(saved[1]), torch.empty_like(saved[2])


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward pass needs."""
    query, key, value, ctx.key_padding_mask, ctx.mask, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)


@first_order_only
def back(ctx: Any, gradient: Tensor, _sums: Tensor | None) -> tuple[Any, ...]:
    """The gradients of the arguments of `tiles`."""
    found = tiles_backward(gradient.contiguous(), list(ctx.saved_tensors), ctx.key_padding_mask, ctx.mask, ctx.scale)
    return *found, None, None, None


tiles.register_autograd(back, setup_context=remember)
