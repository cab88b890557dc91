"""Which keys are kept within a budget: the latest, and those that were attended to most (Zhang et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attn_core import Heads
from attn_core.masking import of_query_heads, shares
from torch import Tensor

TILE = 64
"""Queries of whole sequences whose weights are in memory at once."""


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
    return torch.unflatten(weights.detach(), 1, (heads.key_value, -1)).sum(2).float()


@torch.no_grad()
def last_queries(heads: Heads, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, budget: Budget) -> Tensor:
    """The last query that meets each key, int64 [batch, key_value_heads, token]; the number of tokens where all do.

    `query` [batch, heads, token, size], times the scale, and `key` [batch, key_value_heads, token, size] are those of
    whole sequences; `key_padding_mask` [batch, token], bool. Padding drives out nothing. Tokens that fit into the
    budget gain all at once; those behind are passed one by one, for what one drives out the next does not meet.
    """
    tokens = key.shape[2]
    last = torch.full(key.shape[:3], tokens, device=key.device)
    if tokens <= budget.rows:
        return last
    real = key.new_ones(key.shape[0], tokens).bool() if key_padding_mask is None else key_padding_mask
    places = (real.long().cumsum(1) - 1)[:, None]
    here = torch.arange(tokens, device=key.device)
    gained = gained_within(heads, query[:, :, : budget.rows], key, key_padding_mask, last)
    along = of_query_heads(heads, key).transpose(-1, -2)
    for start in range(budget.rows, tokens, TILE):
        scores = query[:, :, start : start + TILE] @ along
        for token in range(start, min(start + TILE, tokens)):
            counts = real[:, None, token, None]
            kept = real[:, None] & (here <= token) & (last == tokens)
            weights = shares(scores[:, :, token - start], of_query_heads(heads, kept))
            gained = gained + by_group(heads, weights) * counts
            full = counts & (kept.sum(-1, keepdim=True) > budget.rows)
            out = budget.evicted(gained, places, places[..., token, None], kept)
            last = last.masked_fill(full & (here == out[..., None]), token)
    return last


def gained_within(heads: Heads, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, last: Tensor) -> Tensor:
    """What every key [batch, key_value_heads, key] gains, float32, by the first queries, before any is driven out."""
    gained = torch.zeros(key.shape[:3], dtype=torch.float32, device=key.device)
    for start in range(0, query.shape[2], TILE):
        some = query[:, :, start : start + TILE]
        weights = kept_weights(heads, some, key, key_padding_mask, last, start)
        if key_padding_mask is not None:
            weights = weights * key_padding_mask[:, None, start : start + some.shape[2], None]
        gained = gained + by_group(heads, weights.sum(2))
    return gained


def kept_weights(
    heads: Heads, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, last: Tensor, first: int = 0
) -> Tensor:
    """Weights [batch, heads, query, key] over what is kept, of queries [batch, heads, query, size] from the place
    `first` on; the others as of `last_queries`."""
    here = torch.arange(key.shape[2], device=key.device)
    places = here[first : first + query.shape[2], None]
    seen = (here <= places) & (places <= last[:, :, None])
    if key_padding_mask is not None:
        seen = seen & key_padding_mask[:, None, None]
    return shares(query @ of_query_heads(heads, key).transpose(-1, -2), of_query_heads(heads, seen))
