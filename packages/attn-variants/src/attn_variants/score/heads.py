"""Keys and values as each query head reads them."""

from __future__ import annotations

from attn_core import Heads
from torch import Tensor


def of_query_heads(heads: Heads, rows: Tensor) -> Tensor:
    """[batch, heads, ...] of rows [batch, key_value_heads, ...]."""
    if heads.per_group == 1:
        return rows
    if heads.per_group is not None:
        return rows.repeat_interleave(heads.per_group, dim=1)
    return rows[:, list(heads.group_of)]
