"""Scores by the angle between query and key."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus


def cosine_scores(query: Tensor, key: Tensor, sharpness: Tensor, eps: float) -> Tensor:
    """softplus(sharpness) q·k / (‖q‖‖k‖ + eps), [batch, heads, query, key].

    `query` [batch, heads, query, key_size], `key` [batch, heads, key, key_size], `sharpness` [heads].
    """
    norms = torch.linalg.vector_norm(query, dim=-1)[..., :, None] * torch.linalg.vector_norm(key, dim=-1)[..., None, :]
    products = torch.matmul(query, key.transpose(-1, -2))
    scores: Tensor = softplus(sharpness)[:, None, None] * products / (norms + eps)
    return scores
