"""Where queries and keys stand, and which pairs may meet."""

from __future__ import annotations

from attn_core import AttentionInputs, AttentionSpec
from attn_core.masking import positions, seen_pairs
from torch import Tensor


def allowed_pairs(spec: AttentionSpec, operands: AttentionInputs) -> Tensor | None:
    """Bool [batch or 1, heads or 1, query or 1, key], True where a query may see a key; None if every pair may meet."""
    if spec.mask.kind == "full":
        return None if operands.key_padding_mask is None else operands.key_padding_mask[:, None, None, :]
    return seen_pairs(spec.mask, *positions(operands), operands.key_padding_mask)


def nothing(operands: AttentionInputs) -> Tensor:
    """The output where there is no key at all: zeros [batch, query, heads, value_size]."""
    batch, queries, heads, _ = operands.query.shape
    return operands.value.new_zeros(batch, queries, heads, operands.value.shape[-1])
