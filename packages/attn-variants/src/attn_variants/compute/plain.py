"""The plain computation of attention for any spec, as the papers define it."""

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
    """The output [batch, query, heads, value_size] in the dtype of the values.

    16-bit inputs are computed in float32. A query with no allowed key gives zeros and no gradient.
    """
    if operands.key.shape[1] == 0:
        return nothing(operands)
    return summed(spec, operands, dropped(operands, attention_weights(spec, operands)))


def summed(spec: AttentionSpec, operands: AttentionInputs, weights: Tensor) -> Tensor:
    """The sums of the values, weighted by [batch, heads, query, key]: [batch, query, heads, value_size]."""
    value = of_query_heads(spec.heads, wide(operands.value).transpose(1, 2))
    out = torch.matmul(weights, value)
    for modifier in spec.modifiers:
        if isinstance(modifier, RelativeValues):
            out = out + relative_values(pairs_of(spec, operands), modifier, weights)
    return out.transpose(1, 2).to(operands.value.dtype)


def attention_weights(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """Attention weights [batch, heads, query, key], float32 for 16-bit inputs; zeros for queries without a key."""
    pairs = pairs_of(spec, operands)
    return distribute(pairs, modify(pairs, scores(pairs)))


def dropped(operands: AttentionInputs, weights: Tensor) -> Tensor:
    """Apply the dropout of the operands, if any, to weights [batch, heads, query, key]."""
    dropout = operands.dropout
    if dropout is None:
        return weights
    if torch.compiler.is_compiling():
        # Imported here, as it needs torch modules that only processes which compile should load.
        from attn_variants.compute.in_graph import kept_in_graph as kept
    else:
        kept = kept_weights
    return torch.where(kept(dropout, weights), weights * dropout.scale, 0)


def pairs_of(spec: AttentionSpec, operands: AttentionInputs) -> Pairs:
    """Build the `Pairs` of the operands."""
    return Pairs(spec, wide(operands.query).transpose(1, 2), wide(operands.key).transpose(1, 2), operands)
