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
    # A compiled graph cannot look at a position; there torch refuses one that has no row.
    if keys and not torch.compiler.is_compiling() and int(positions.max()) >= longest:
        given = f"a key at position {int(positions.max())}"
        raise InvalidValue.of("key", given, f"positions below {longest}, as location-based scores have rows")
    rows = torch.unflatten(weight.index_select(1, positions.flatten()), 1, positions.shape)
    return torch.matmul(query, rows.transpose(0, 1).transpose(-1, -2))
