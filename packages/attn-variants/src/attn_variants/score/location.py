"""Scores that the query alone decides."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from torch import Tensor


def location_scores(query: Tensor, weight: Tensor, keys: int, positions: Tensor | None) -> Tensor:
    """(W q)_j for the positions j of the keys, [batch, heads, query, key].

    `query` [batch, heads, query, key_size], `weight` [heads, longest, key_size]; `positions` [batch or 1, key] of the
    keys are 0 to `keys` where they are None. Raises `InvalidValue` for a position from `longest` on.
    """
    longest = weight.shape[1]
    if positions is None:
        if keys > longest:
            raise InvalidValue.of("key", f"{keys} keys", f"at most {longest}, as location-based scores have rows")
        return torch.matmul(query, weight[:, :keys].transpose(-1, -2))
    if keys and int(positions.max()) >= longest:
        given = f"a key at position {int(positions.max())}"
        raise InvalidValue.of("key", given, f"positions below {longest}, as location-based scores have rows")
    every = torch.matmul(query, weight.transpose(-1, -2))
    return every.gather(-1, positions[:, None, None, :].expand(*every.shape[:-1], -1))
