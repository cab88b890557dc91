"""The scores of every query and key."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from attn_core.masking import of_query_heads
from attn_core.scores import Cosine, ScaledDot, Score
from torch import Tensor

from attn_variants.compute.pairs import Pairs
from attn_variants.score.additive import additive_scores, concat_scores
from attn_variants.score.cosine import cosine_scores
from attn_variants.score.location import location_scores


def scores(pairs: Pairs) -> Tensor:
    """Scores [batch, heads, query, key]."""
    score, heads, query, key = pairs.spec.score, pairs.spec.heads, pairs.query, pairs.key
    weights = pairs.weights("score")
    if score.kind == "additive":
        return additive_scores(heads, query, key, weights)
    if score.kind == "concat":
        return concat_scores(heads, query, key, weights)
    if score.kind == "location":
        return location_scores(query, weights["weight"], key.shape[-2], pairs.operands.key_positions)
    if isinstance(score, Cosine):
        return cosine_scores(query, of_query_heads(heads, key), weights["sharpness"], score.eps)
    if score.kind == "general":
        query = torch.matmul(query, weights["weight"])
    elif score.kind == "scaled_dot":
        query = query * scale_of(score, query.shape[-1])
    elif score.kind != "dot":
        raise InvalidValue.of("score", score.kind, "scaled_dot, dot, general, cosine, additive, concat, location")
    return torch.matmul(query, of_query_heads(heads, key).transpose(-1, -2))


def scale_of(score: Score, size: int) -> float:
    """What products of a query and a key are multiplied by: 1/√d_k, the scale that the score names, or 1."""
    if not isinstance(score, ScaledDot):
        return 1.0
    return float(size) ** -0.5 if score.scale is None else score.scale
