"""The queries, keys, positions and allowed pairs of the plain computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_core import AttentionInputs, AttentionSpec
from attn_core.masking import positions, seen_pairs
from torch import Tensor


def allowed_pairs(spec: AttentionSpec, operands: AttentionInputs) -> Tensor | None:
    """Bool [batch or 1, heads or 1, query or 1, key], True if a query may see a key; None if all pairs are allowed."""
    if spec.mask.kind == "full":
        return None if operands.key_padding_mask is None else operands.key_padding_mask[:, None, None, :]
    return seen_pairs(spec.mask, *positions(operands), operands.key_padding_mask)


def nothing(operands: AttentionInputs) -> Tensor:
    """The output of a call without keys: zeros [batch, query, heads, value_size]."""
    batch, queries, heads, _ = operands.query.shape
    return operands.value.new_zeros(batch, queries, heads, operands.value.shape[-1])


@dataclass(frozen=True, eq=False)
class Pairs:
    """The inputs of the plain computation, in at least float32, with the head axis before the token axis.

    `query` [batch, heads, query, key_size], `key` [batch, key_value_heads, key, key_size]; the rest as in `operands`.
    """

    spec: AttentionSpec
    query: Tensor
    key: Tensor
    operands: AttentionInputs

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Positions of queries [batch or 1, 1, query, 1] and of keys [batch or 1, 1, 1, key], int64."""
        query, key = positions(self.operands)
        return query[:, None, :, None], key[:, None, None, :]

    @property
    def allowed(self) -> Tensor | None:
        """Bool, broadcastable to [batch, heads, query, key], True if a query may see a key; None if all may."""
        return allowed_pairs(self.spec, self.operands)

    def weights(self, place: str) -> Mapping[str, Tensor]:
        """The learned tensors of the part at `place`, such as "score", by name, in the dtype of the queries."""
        parameters = self.operands.parameters
        names = [name for name in parameters if name.rpartition(".")[0] == place]
        return {name.rpartition(".")[2]: parameters[name].to(self.query.dtype) for name in names}
