"""Linear attention over features: at once, by chunks, and one token after the other.

Shapes: features of queries and keys [batch, tokens, heads, key_size], values [batch, tokens, heads, value_size + 1]
whose last column is one, so that the sums S and z of the paper are one tensor [batch, heads, key_size,
value_size + 1]. All of one floating type, at least float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import elu, pad

EPSILON = 1e-6
"""Added to every denominator, as in the code of Katharopoulos et al. 2020."""


def features(rows: Tensor) -> Tensor:
    """elu(x) + 1, in at least float32."""
    wide = rows.float() if rows.dtype in {torch.float16, torch.bfloat16} else rows
    return elu(wide) + 1


def with_ones(values: Tensor, like: Tensor) -> Tensor:
    """Values in the type of `like`, with a last column of ones."""
    return pad(values.to(like.dtype), (0, 1), value=1.0)


def divided(sums: Tensor) -> Tensor:
    """Numerators [..., value_size + 1] by their last column, [..., value_size]; 0 where nothing was seen."""
    return sums[..., :-1] / (sums[..., -1:] + EPSILON)


def sums_of(key: Tensor, value: Tensor) -> Tensor:
    """Σ φ(k) vᵀ over all tokens."""
    return torch.einsum("bkhd,bkhe->bhde", key, value)


def bidirectional(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Outputs [batch, query, heads, value_size]: every query sees every key."""
    return divided(torch.einsum("bqhd,bhde->bqhe", query, sums_of(key, value)))


def recurrent(query: Tensor, key: Tensor, value: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [batch, tokens, heads, value_size] and the sums after them, token by token as in the paper."""
    outs = []
    for token in range(query.shape[1]):
        before = before + key[:, token, :, :, None] * value[:, token, :, None, :]
        outs.append(torch.einsum("bhd,bhde->bhe", query[:, token], before))
    return divided(torch.stack(outs, dim=1)), before


def chunked(query: Tensor, key: Tensor, value: Tensor, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """What `recurrent` computes, with pairs inside chunks and sums between them; `before` None is nothing.

    Memory grows with tokens · (chunk + key_size · value_size / chunk) a head.
    """
    length = query.shape[1]
    chunk = min(chunk, length)
    spare = -length % chunk
    query, key, value = (_chunks(rows, chunk, spare) for rows in (query, key, value))
    own = torch.einsum("bckhd,bckhe->bchde", key, value)
    until = own.cumsum(1)
    earlier = until - own if before is None else until - own + before[:, None]
    pairs = torch.einsum("bcqhd,bckhd->bchqk", query, key).tril()
    seen = torch.einsum("bchqk,bckhe->bcqhe", pairs, value) + torch.einsum("bcqhd,bchde->bcqhe", query, earlier)
    after = until[:, -1] if before is None else until[:, -1] + before
    return divided(seen.flatten(1, 2)[:, :length]), after


def _chunks(rows: Tensor, chunk: int, spare: int) -> Tensor:
    """[batch, chunks, chunk, heads, size] of [batch, tokens, heads, size], with `spare` zero rows at the end."""
    padded = pad(rows, (0, 0, 0, 0, 0, spare))
    return padded.reshape(rows.shape[0], -1, chunk, rows.shape[2], rows.shape[3])
