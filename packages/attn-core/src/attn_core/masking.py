"""Helpers for attention layers with a computation of their own: positions, allowed pairs, and softmax over them.

Only methods and operators of tensors are used, so that the contract needs no tensor library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_core.heads import Heads
from attn_core.kernels.attend import AttentionInputs
from attn_core.masks.base import Mask

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

LOWEST = -3e38
"""Lower than any score, and finite in float32."""


def positions(operands: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Positions of queries [batch or 1, query] and keys [batch or 1, key], int64.

    Where they are not given, queries are aligned to the end of the keys: query i of n over S keys is at S - n + i.
    """
    query, key = operands.query_positions, operands.key_positions
    if query is None:
        query = counted(operands.query) + (operands.key.shape[1] - operands.query.shape[1])
    return query, counted(operands.key) if key is None else key


def counted(rows: Tensor) -> Tensor:
    """0, 1, ..., int64 [1, row], for rows [batch, row, ...]."""
    return rows.new_ones(1, rows.shape[1]).long().cumsum(1) - 1


def allowed_pairs(mask: Mask, operands: AttentionInputs) -> Tensor:
    """Bool [batch or 1, heads or 1, query, key], True where a query may see a real key; see `seen_pairs`."""
    return seen_pairs(mask, *positions(operands), operands.key_padding_mask)


def seen_pairs(mask: Mask, query: Tensor, key: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """Bool [batch or 1, heads or 1, query, key], True where the mask allows a pair and the key is real.

    `query` [batch or 1, query] and `key` [batch or 1, key] are positions, `key_padding_mask` [batch, key] as in
    `AttentionInputs`. For a mask that depends on the number of keys, that number is one more than the position of the
    last real key.
    """
    kept = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    query, key = query[:, None, :, None], key[:, None, None, :]
    if mask.by_length:
        mask = mask.over(number_of_keys(key, kept))
    if mask.heads is None:
        seen: Tensor = mask.allows(query, key)
    else:
        first = mask.of_head(0).allows(query, key)
        seen = first.repeat(1, mask.heads, 1, 1)
        for head in range(1, mask.heads):
            seen[:, head : head + 1] = mask.of_head(head).allows(query, key)
    return seen if kept is None else seen & kept


def number_of_keys(key: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """One more than the last position of the real keys, [..., 1], for positions [..., key]; 0 where no key is real."""
    if key.shape[-1] == 0:
        return key.sum(-1, keepdim=True)
    ends = key + 1
    real: Tensor = ends if key_padding_mask is None else ends * key_padding_mask
    return real.amax(-1, keepdim=True)


def of_query_heads(heads: Heads, rows: Tensor) -> Tensor:
    """Expand rows [batch, key_value_heads, ...] to [batch, heads, ...]: the rows that each query head reads."""
    if heads.per_group == 1:
        return rows
    if heads.per_group is not None:
        return rows.repeat_interleave(heads.per_group, dim=1)
    return rows[:, list(heads.group_of)]


def wide(rows: Tensor) -> Tensor:
    """Convert rows of 16-bit numbers to float32, in which sums and exponentials are computed."""
    return rows.float() if rows.element_size() < 4 else rows


def shares(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax of scores [..., key] over the allowed keys; zeros, without gradient, where no key is allowed."""
    # Exponentials of -inf are slow, and a row of -inf alone would be NaN; beside any score LOWEST has no weight.
    weights: Tensor = scores.masked_fill(~allowed, LOWEST).softmax(-1)
    return weights.masked_fill(~allowed, 0.0)
