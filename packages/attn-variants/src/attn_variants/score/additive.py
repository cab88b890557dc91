"""Additive scores vᵀ tanh(W_q q + W_k k + b)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attn_core import Additive, Heads
from torch import Tensor, nn

from attn_variants.score.heads import of_query_heads

PIECE = 1 << 24
"""Most elements of the hidden layer of all pairs held at once where no gradient is wanted."""


class AdditiveParameters(nn.Module):
    """W_q [heads, key_size, units], W_k [key_value_heads, key_size, units], b and v [heads, units].

    W are drawn from N(0, 0.001²) and b is zero as in Bahdanau et al. 2015, appendix B.1. There v is zero too, which
    leaves W without a gradient in the first step; here v is uniform in ±1/√units so that all learn from the start.
    """

    def __init__(self, score: Additive, heads: Heads) -> None:
        super().__init__()
        units = score.units(heads)
        self.query_weight = nn.Parameter(torch.randn(heads.query, heads.key_size, units) * 0.001)
        self.key_weight = nn.Parameter(torch.randn(heads.key_value, heads.key_size, units) * 0.001)
        self.bias = nn.Parameter(torch.zeros(heads.query, units))
        self.vector = nn.Parameter((torch.rand(heads.query, units) * 2 - 1) * units**-0.5)


def additive_scores(heads: Heads, query: Tensor, key: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Scores [batch, heads, query, key] of queries [batch, heads, query, key_size] and keys [batch, key_value_heads,
    key, key_size]."""
    hidden_query = torch.matmul(query, parameters["query_weight"]) + parameters["bias"][:, None, :]
    hidden_key = of_query_heads(heads, torch.matmul(key, parameters["key_weight"]))
    vector = parameters["vector"]
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _pair_scores(hidden_query, hidden_key, vector)
    rows = max(1, PIECE // max(1, hidden_key.numel()))
    pieces = [_pair_scores(piece, hidden_key, vector) for piece in torch.split(hidden_query, rows, dim=2)]
    return torch.cat(pieces, dim=2)


def _pair_scores(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    hidden = torch.tanh(query[:, :, :, None, :] + key[:, :, None, :, :])
    return torch.matmul(hidden, vector[:, None, :, None]).squeeze(-1)
