"""Attention of any spec, written as in the papers."""

from __future__ import annotations

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.masking import of_query_heads, wide
from attn_core.modifiers import RelativeValues
from torch import Tensor

from attn_variants.compute.distribution import distribute
from attn_variants.compute.dropout import kept_weights
from attn_variants.compute.modifiers import modify
from attn_variants.compute.pairs import Pairs, nothing
from attn_variants.compute.relative import relative_values
from attn_variants.scores import scores


def attend(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """The output [batch, query, heads, value_size] in the type of the values.

    16-bit inputs are computed in float32. A query with no allowed key gives zeros and no gradient.
    """
    if operands.key.shape[1] == 0:
        return nothing(operands)
    return summed(spec, operands, dropped(operands, attention_weights(spec, operands)))


def summed(spec: AttentionSpec, operands: AttentionInputs, weights: Tensor) -> Tensor:
    """What weights [batch, heads, query, key] make of the values: [batch, query, heads, value_size]."""
    value = of_query_heads(spec.heads, wide(operands.value).transpose(1, 2))
    out = torch.matmul(weights, value)
    for modifier in spec.modifiers:
        if isinstance(modifier, RelativeValues):
            out = out + relative_values(pairs_of(spec, operands), modifier, weights)
    return out.transpose(1, 2).to(operands.value.dtype)


def attention_weights(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """Weights [batch, heads, query, key], float32 for 16-bit inputs; zeros where no key is allowed."""
    pairs = pairs_of(spec, operands)
    return distribute(pairs, modify(pairs, scores(pairs)))


def dropped(operands: AttentionInputs, weights: Tensor) -> Tensor:
    """Weights [batch, heads, query, key] of which some are dropped, where the operands say so."""
    dropout = operands.dropout
    if dropout is None:
        return weights
    if torch.compiler.is_compiling():
        # Made by a part of torch that only a process which compiles need load.
        from attn_variants.compute.in_graph import kept_in_graph as kept
    else:
        kept = kept_weights
    return torch.where(kept(dropout, weights), weights * dropout.scale, 0)


def pairs_of(spec: AttentionSpec, operands: AttentionInputs) -> Pairs:
    """Queries and keys as they meet."""
    return Pairs(spec, wide(operands.query).transpose(1, 2), wide(operands.key).transpose(1, 2), operands)
