"""Attention scores, computed by their definitions."""

from __future__ import annotations

import math

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.scores import Cosine, ScaledDot
from torch import Tensor

from attn_testing.oracle.pairing import places, weights_of

SCORES = ("scaled_dot", "dot", "general", "cosine", "additive", "concat", "location")


def scores(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """Scores [batch, heads, query, key]."""
    query, key = operands.query, operands.key[:, :, list(spec.heads.group_of)]
    weights = weights_of(operands, "score")
    if spec.score.kind == "location":
        rows = weights["weight"][:, places(operands)[1]]
        return torch.einsum("bqhd,hbkd->bhqk", query, rows.expand(-1, query.shape[0], -1, -1))
    products = torch.einsum("bqhd,bkhd->bhqk", query, key)
    if isinstance(spec.score, ScaledDot):
        return products * (1 / math.sqrt(query.shape[-1]) if spec.score.scale is None else spec.score.scale)
    if spec.score.kind == "dot":
        return products
    if isinstance(spec.score, Cosine):
        lengths = torch.einsum("bqh,bkh->bhqk", query.norm(dim=-1), key.norm(dim=-1))
        given, cosines = spec.score.beta, products / (lengths + spec.score.eps)
        return given * cosines if given is not None else (1 + weights["sharpness"].exp()).log()[:, None, None] * cosines
    if spec.score.kind == "general":
        return torch.einsum("bqhd,hde,bkhe->bhqk", query, weights["weight"], key)
    return by_network(spec, operands, key)


def by_network(spec: AttentionSpec, operands: AttentionInputs, key: Tensor) -> Tensor:
    """Additive and concat scores [batch, heads, query, key] of keys [batch, key, heads, key_size]."""
    weights, query = weights_of(operands, "score"), operands.query
    if spec.score.kind == "concat":
        both = [
            key[:, None].expand(-1, query.shape[1], -1, -1, -1),
            query[:, :, None].expand(-1, -1, key.shape[1], -1, -1),
        ]
        both_weights = torch.cat([weights["key_weight"], weights["query_weight"]], dim=1)
        hidden = torch.einsum("bqkhd,hdu->bhqku", torch.cat(both, dim=-1), both_weights)
    else:
        of_query = torch.einsum("bqhd,hdu->bhqu", query, weights["query_weight"])
        of_key = torch.einsum("bkhd,hdu->bhku", key, weights["key_weight"][list(spec.heads.group_of)])
        hidden = of_query[:, :, :, None] + of_key[:, :, None]
    hidden = hidden + weights["bias"][:, None, None]
    shaped = hidden * (hidden > 0) if getattr(spec.score, "activation", "tanh") == "relu" else torch.tanh(hidden)
    return torch.einsum("bhqku,hu->bhqk", shaped, weights["vector"])
