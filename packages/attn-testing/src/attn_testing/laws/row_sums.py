"""Attention weights are shares."""

from __future__ import annotations

from typing import ClassVar

import torch
from attn_core import Capability
from torch import Tensor

from attn_testing.case import Case
from attn_testing.expect import require, require_same
from attn_testing.law import MechanismLaw


class RowSums(MechanismLaw):
    """Weights are not negative, sum to one over the allowed keys and are zero on all others."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.WEIGHTS, Capability.NORMALISED)

    def test_weights_are_shares_of_the_allowed_keys(self, case: Case) -> None:
        query, source = case.rows(2, 7), case.source(2, 5)
        check_weights(case, case.weights(query, source), None)

    def test_weights_of_padded_sequences_are_shares_of_the_real_keys(self, case: Case) -> None:
        if not case.mechanism.can(Capability.PADDING):
            return
        query, source = case.rows(2, 7), case.source(2, 7)
        key_padding_mask = torch.ones(2, 7, dtype=torch.bool)
        key_padding_mask[1, 4:] = False
        check_weights(case, case.weights(query, source, key_padding_mask), key_padding_mask)


def check_weights(case: Case, weights: Tensor, key_padding_mask: Tensor | None) -> None:
    """Raise `LawBroken` unless `weights` [batch, heads, query, key] are shares of the allowed keys."""
    batch, heads, queries, keys = weights.shape
    rows = [
        allowed_pairs(case, queries, keys, None if key_padding_mask is None else key_padding_mask[row])
        for row in range(batch)
    ]
    allowed = torch.stack(rows).expand(batch, heads, queries, keys)
    require(bool(torch.isfinite(weights).all()), "a weight is not finite")
    require(bool((weights >= 0).all()), f"a weight is negative: {weights.min().item():g}")
    outside = weights.masked_fill(allowed, 0).abs().max().item()
    require(outside == 0, f"a key that is not allowed has weight {outside:g}")
    sums = allowed.any(-1).to(weights.dtype).expand(weights.shape[:-1])
    require_same(weights.sum(-1), sums, "the sums of the weights and one", 1e-10)


def allowed_pairs(case: Case, queries: int, keys: int, key_padding_mask: Tensor | None) -> Tensor:
    """Which pairs [heads or 1, query, key] are allowed, by the spec's mask where the mechanism has one."""
    # Queries of cross attention count from the start: they have no place among the keys.
    first = 0 if case.cross else keys - queries
    rows = torch.arange(first, first + queries)[:, None]
    columns = torch.arange(keys)[None, :]
    real = torch.ones(keys, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    spec = case.mechanism.spec(case.config)
    if spec is None:
        seen = columns <= rows if case.causal and not case.cross else torch.ones(queries, keys, dtype=torch.bool)
        return seen[None] & real
    mask = spec.mask.over(int((real * (columns + 1)).max()))
    heads = [mask.of_head(head).allows(rows, columns).expand(queries, keys) for head in range(mask.heads or 1)]
    return torch.stack(heads) & real
