"""The scores of every query and key."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attn_core import AttentionSpec, Score
from attn_core.errors import InvalidValue
from attn_core.score import ScaledDot
from torch import Tensor

from attn_variants.score.additive import additive_scores
from attn_variants.score.heads import of_query_heads


def scores(spec: AttentionSpec, query: Tensor, key: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Scores [batch, heads, query, key].

    `query` [batch, heads, query, key_size], `key` [batch, key_value_heads, key, key_size]; `parameters` are
    those that the score's module holds, by name.
    """
    parameters = {name: tensor.to(query.dtype) for name, tensor in parameters.items()}
    if spec.score.kind == "additive":
        return additive_scores(spec.heads, query, key, parameters)
    if spec.score.kind == "general":
        query = torch.matmul(query, parameters["weight"])
    elif spec.score.kind == "scaled_dot":
        query = query * scale_of(spec.score, query.shape[-1])
    else:
        raise InvalidValue.of("score", spec.score.kind, "scaled_dot, general, additive")
    return torch.matmul(query, of_query_heads(spec.heads, key).transpose(-1, -2))


def scale_of(score: Score, size: int) -> float:
    """1/√d_k, or the scale that the score names."""
    scale = score.scale if isinstance(score, ScaledDot) else None
    return float(size) ** -0.5 if scale is None else scale
