"""Linear attention over features: at once, by chunks, and one token after the other.

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
    """Outputs [batch, tokens, heads, value_size]: every query sees every key."""
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    sums = torch.matmul(key.transpose(-1, -2), value)
    return divided(torch.matmul(query, sums)).transpose(1, 2)


def recurrent(query: Tensor, key: Tensor, value: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [batch, tokens, heads, value_size] and the sums after them, token by token as in the paper."""
    outs = []
    for token in range(query.shape[1]):
        before = before + key[:, token, :, :, None] * value[:, token, :, None, :]
        outs.append(torch.matmul(query[:, token, :, None, :], before)[:, :, 0])
    return divided(torch.stack(outs, dim=1)), before


def chunked(query: Tensor, key: Tensor, value: Tensor, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """What `recurrent` computes, with pairs inside chunks and sums between them; `before` None is nothing.

    Memory grows with tokens · (chunk + key_size · value_size / chunk) a head.
    """
    batch, length, heads, _ = query.shape
    chunk = min(chunk, length)
    query, key, value = (_chunks(rows, chunk) for rows in (query, key, value))
    own = torch.matmul(key.transpose(-1, -2), value)
    until = own.cumsum(1)
    earlier = until - own if before is None else until - own + before[:, None]
    pairs = torch.matmul(query, key.transpose(-1, -2)).tril()
    seen = torch.matmul(pairs, value) + torch.matmul(query, earlier)
    after = until[:, -1] if before is None else until[:, -1] + before
    rows = divided(seen).transpose(2, 3).reshape(batch, -1, heads, value.shape[-1] - 1)
    return rows[:, :length], after


def _chunks(rows: Tensor, chunk: int) -> Tensor:
    """[batch, chunks, heads, chunk, size] of [batch, tokens, heads, size], with zero rows at the end."""
    batch, length, heads, size = rows.shape
    padded = pad(rows, (0, 0, 0, 0, 0, -length % chunk))
    return padded.reshape(batch, -1, chunk, heads, size).transpose(2, 3)
