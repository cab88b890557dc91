"""Changes to the scores between f(q, k) and the distribution."""

from __future__ import annotations

import math

import torch
from attn_core import AttentionSpec, ScoreFunction, SoftCap
from attn_core.errors import InvalidValue
from torch import Tensor


def modify(spec: AttentionSpec, scores: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Scores [batch, heads, query, key] after every modifier, in order.

    `query` [batch or 1, 1, query, 1] and `key` [batch or 1, 1, 1, key] are absolute positions.
    """
    for modifier in spec.modifiers:
        if modifier.kind == "alibi":
            scores = scores + alibi_bias(spec.heads.query, query, key, scores.dtype)
        elif isinstance(modifier, SoftCap):
            scores = modifier.cap * torch.tanh(scores / modifier.cap)
        elif isinstance(modifier, ScoreFunction):
            head = torch.arange(spec.heads.query, device=scores.device)[None, :, None, None]
            scores = modifier.function(scores, head, query, key)
        else:
            raise InvalidValue.of("modifier", modifier.kind, "alibi, soft_cap, function")
    return scores


def alibi_bias(heads: int, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """-m_h |i - j| [batch or 1, heads, query, key] (Press et al. 2022)."""
    slopes = torch.tensor(alibi_slopes(heads), dtype=dtype, device=query.device)
    return -slopes[:, None, None] * (query - key).abs()


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8h/H) for h = 1..H; for other H, those of the power of two below, then every other one of the next."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]
