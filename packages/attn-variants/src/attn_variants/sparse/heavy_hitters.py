"""Which keys are kept within a budget: the latest, and those that were attended to most (Zhang et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attn_core import Heads
from attn_core.pairs import of_query_heads, shares
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Budget:
    """So many `heavy` keys are kept, besides the `recent` latest; each key/value head has its own."""

    heavy: int
    recent: int

    @property
    def rows(self) -> int:
        """Keys that are kept in all."""
        return self.heavy + self.recent

    def evicted(self, gained: Tensor, places: Tensor, newest: Tensor, present: Tensor) -> Tensor:
        """The index [...] of the key that goes: of those that are not recent the one that gained least, of several the
        oldest.

        `gained`, `places` and `present` broadcast to [..., key]; `newest` [..., 1] is the place of the newest key.
        """
        free = present & (places <= newest - self.recent)
        left = gained.masked_fill(~free, torch.inf)
        least = free & (left == left.amin(-1, keepdim=True))
        return places.expand(least.shape).masked_fill(~least, torch.iinfo(places.dtype).max).argmin(-1)


def by_group(heads: Heads, weights: Tensor) -> Tensor:
    """What keys gain by weights [batch, heads, key]: float32 sums [batch, key_value_heads, key] over query heads."""
    return weights.detach().unflatten(1, (heads.key_value, -1)).sum(2).float()  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def kept_pairs(heads: Heads, scores: Tensor, keep: Tensor | None, budget: Budget) -> Tensor:
    """Bool [batch, heads, query, key], True where the key is still kept when the query comes.

    `scores` [batch, heads, token, token] are those of whole sequences, query by query; `keep` [batch, token], bool.
    Padding is never kept, and gives nothing to what is.
    """
    batch, _, tokens, _ = scores.shape
    real = torch.ones(batch, tokens, dtype=torch.bool, device=scores.device) if keep is None else keep
    places = (real.long().cumsum(1) - 1)[:, None]
    here = torch.arange(tokens, device=scores.device)
    kept = torch.zeros(batch, heads.key_value, tokens, dtype=torch.bool, device=scores.device)
    gained = torch.zeros(kept.shape, dtype=torch.float32, device=scores.device)
    rows = []
    for token in range(tokens):
        counts = real[:, None, token, None]
        kept = kept | (counts & (here == token))
        seen = of_query_heads(heads, kept)
        rows.append(seen)
        gained = gained + by_group(heads, shares(scores[:, :, token], seen)) * counts
        full = counts & (kept.sum(-1, keepdim=True) > budget.rows)
        out = budget.evicted(gained, places, places[..., token, None], kept)
        kept = kept & ~(full & (here == out[..., None]))
    return torch.stack(rows, dim=2) if rows else torch.zeros_like(scores, dtype=torch.bool)
