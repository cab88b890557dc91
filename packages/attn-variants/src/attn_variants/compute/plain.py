"""Attention as its equation: scores, modifiers, mask, distribution, weighted sum."""

from __future__ import annotations

import torch
from attn_core import AttentionSpec, Operands
from torch import Tensor

from attn_variants.compute.distribution import distribute
from attn_variants.compute.modifiers import modify
from attn_variants.compute.operands import allowed_pairs, nothing, positions
from attn_variants.score.compute import scores


def attend(spec: AttentionSpec, operands: Operands) -> Tensor:
    """The output [batch, query, heads, value_size] in the type of the values.

    16-bit inputs are computed in float32. A query with no allowed key gives zeros and no gradient.
    """
    if operands.key.shape[1] == 0:
        return nothing(operands)
    weights = attention_weights(spec, operands)
    value = heads_of(spec, wide(operands.value))
    return torch.einsum("bhqk,bkhd->bqhd", weights, value).to(operands.value.dtype)


def attention_weights(spec: AttentionSpec, operands: Operands) -> Tensor:
    """Weights [batch, heads, query, key], float32 for 16-bit inputs; zeros where no key is allowed."""
    energies = scores(spec, wide(operands.query), wide(operands.key), operands.parameters)
    if spec.modifiers:
        query, key = positions(operands)
        energies = modify(spec, energies, query[:, None, :, None], key[:, None, None, :])
    return distribute(spec.distribution, energies, allowed_pairs(spec, operands))


def heads_of(spec: AttentionSpec, rows: Tensor) -> Tensor:
    """Keys or values [batch, key, key_value_heads, size] as each query head reads them, [batch, key, heads, size]."""
    heads = spec.heads
    if heads.query == heads.key_value and heads.per_group == 1:
        return rows
    if heads.per_group is not None:
        return rows.repeat_interleave(heads.per_group, dim=2)
    return rows[:, :, list(heads.group_of)]


def wide(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
