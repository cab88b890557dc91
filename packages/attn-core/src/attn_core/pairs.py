"""What attentions that compute their own way share: where rows stand, which pairs may meet, and shares of scores.

Only methods and operators of tensors are used, so that the contract needs no tensor library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_core.heads import Heads
from attn_core.kernel import Operands
from attn_core.mask import Mask

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

NEVER = float("-inf")


def positions(operands: Operands) -> tuple[Tensor, Tensor]:
    """Positions of queries [batch or 1, query] and keys [batch or 1, key], int64.

    Those not given are aligned to the end of the keys: query i of n over S keys stands at S - n + i.
    """
    query, key = operands.query_positions, operands.key_positions
    if query is None:
        query = counted(operands.query) + (operands.key.shape[1] - operands.query.shape[1])
    return query, counted(operands.key) if key is None else key


def counted(rows: Tensor) -> Tensor:
    """0, 1, ..., int64 [1, row], for rows [batch, row, ...]."""
    return rows.new_ones(1, rows.shape[1]).long().cumsum(1) - 1


def allowed_pairs(mask: Mask, operands: Operands) -> Tensor:
    """Bool [batch or 1, 1, query, key], True where a query may see a real key."""
    query, key = positions(operands)
    allowed: Tensor = mask.allows(query[:, None, :, None], key[:, None, None, :])
    return allowed if operands.keep is None else allowed & operands.keep[:, None, None, :]


def of_query_heads(heads: Heads, rows: Tensor) -> Tensor:
    """[batch, heads, ...] of rows [batch, key_value_heads, ...]: what each query head reads."""
    if heads.per_group == 1:
        return rows
    if heads.per_group is not None:
        return rows.repeat_interleave(heads.per_group, dim=1)
    return rows[:, list(heads.group_of)]


def wide(rows: Tensor) -> Tensor:
    """At least float32: sums and exponentials of 16-bit numbers are taken in it."""
    return rows.float() if rows.element_size() < 4 else rows


def shares(scores: Tensor, allowed: Tensor) -> Tensor:
    """exp(e) / Σ of scores [..., key] over the allowed keys; where there is none, zeros and no gradient."""
    scores = scores.masked_fill(~allowed, NEVER)
    # Shifting by the largest score changes nothing but the range of exp, so no gradient need pass through it.
    largest = scores.detach().amax(-1, keepdim=True)
    powers = (scores - largest.masked_fill(largest == NEVER, 0.0)).exp()
    total = powers.sum(-1, keepdim=True)
    return powers / total.masked_fill(total == 0, 1.0)
