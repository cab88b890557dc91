"""Attention as its equation: scores, modifiers, mask, distribution, weighted sum."""

from __future__ import annotations

import torch
from attn_core import AttentionSpec, Operands
from torch import Tensor

from attn_variants.compute.distribution import distribute
from attn_variants.compute.modifiers import modify
from attn_variants.compute.operands import allowed_pairs, nothing, positions
from attn_variants.score.compute import scores
from attn_variants.score.heads import of_query_heads


def attend(spec: AttentionSpec, operands: Operands) -> Tensor:
    """The output [batch, query, heads, value_size] in the type of the values.

    16-bit inputs are computed in float32. A query with no allowed key gives zeros and no gradient.
    """
    if operands.key.shape[1] == 0:
        return nothing(operands)
    value = of_query_heads(spec.heads, wide(operands.value).transpose(1, 2))
    out = torch.matmul(attention_weights(spec, operands), value)
    return out.transpose(1, 2).to(operands.value.dtype)


def attention_weights(spec: AttentionSpec, operands: Operands) -> Tensor:
    """Weights [batch, heads, query, key], float32 for 16-bit inputs; zeros where no key is allowed."""
    query, key = wide(operands.query).transpose(1, 2), wide(operands.key).transpose(1, 2)
    energies = scores(spec, query, key, operands.parameters)
    if spec.modifiers:
        query_positions, key_positions = positions(operands)
        energies = modify(spec, energies, query_positions[:, None, :, None], key_positions[:, None, None, :])
    return distribute(spec.distribution, energies, allowed_pairs(spec, operands))


def wide(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
