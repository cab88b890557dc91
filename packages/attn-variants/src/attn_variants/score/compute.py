"""The scores of every query and key."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attn_core import AttentionSpec, Score
from attn_core.errors import InvalidValue
from attn_core.score import ScaledDot
from torch import Tensor

from attn_variants.score.additive import additive_scores


def scores(spec: AttentionSpec, query: Tensor, key: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Scores [batch, heads, query, key].

    `query` [batch, query, heads, key_size], `key` [batch, key, key_value_heads, key_size]; `parameters` are
    those that the score's module holds, by name.
    """
    groups = spec.heads.group_of
    parameters = {name: tensor.to(query.dtype) for name, tensor in parameters.items()}
    if spec.score.kind == "additive":
        return additive_scores(groups, query, key, parameters)
    if spec.score.kind == "general":
        query = torch.einsum("bqhd,hde->bqhe", query, parameters["weight"])
    elif spec.score.kind == "scaled_dot":
        query = query * scale_of(spec.score, query.shape[-1])
    else:
        raise InvalidValue.of("score", spec.score.kind, "scaled_dot, general, additive")
    return torch.einsum("bqhd,bkhd->bhqk", query, key_of_heads(groups, key))


def scale_of(score: Score, size: int) -> float:
    """1/√d_k, or the scale that the score names."""
    scale = score.scale if isinstance(score, ScaledDot) else None
    return float(size) ** -0.5 if scale is None else scale


def key_of_heads(groups: tuple[int, ...], key: Tensor) -> Tensor:
    """Keys [batch, key, key_value_heads, size] as each query head reads them, [batch, key, heads, size]."""
    if groups == tuple(range(key.shape[2])):
        return key
    return key[:, :, list(groups)]
