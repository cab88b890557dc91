"""Features of linear attention, and its sums over all tokens; `recurrences` has those over earlier ones.

Shapes: features of queries and keys [batch, tokens, heads, key_size], values [batch, tokens, heads, value_size + 1]
whose last column is one, so that the sums S and z of the paper are one tensor [batch, heads, key_size,
value_size + 1]. All of one floating type, at least float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, relu

EPSILON = 1e-6
"""Added to every denominator, as in the code of Katharopoulos et al. 2020."""


def features(rows: Tensor) -> Tensor:
    """elu(x) + 1, in at least float32.

    Written as e^min(x, 0) + max(x, 0), which is positive for all x; 1 + (e^x - 1) is zero below -17 in float32.
    """
    wide = rows.float() if rows.dtype in {torch.float16, torch.bfloat16} else rows
    return torch.exp(wide.clamp(max=0)) + relu(wide)


def with_ones(values: Tensor, like: Tensor) -> Tensor:
    """Values in the type of `like`, with a last column of ones."""
    return pad(values.to(like.dtype), (0, 1), value=1.0)


def divided(sums: Tensor) -> Tensor:
    """Numerators [..., value_size + 1] by their last column, [..., value_size]; 0 where nothing was seen."""
    return sums[..., :-1] / (sums[..., -1:] + EPSILON)


def bidirectional(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Sums [batch, tokens, heads, value_size + 1]: every query sees every key."""
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    sums = torch.matmul(key.transpose(-1, -2), value)
    return torch.matmul(query, sums).transpose(1, 2)
