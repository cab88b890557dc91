"""The layer of H2O, which keeps a budget of keys and values (Zhang et al. 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from attn_core import AttentionInputs, AttentionSpec, Fields, Heads, LayerState, RaggedBatch
from attn_core.masking import of_query_heads, shares, wide
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_variants.attention.kernels import AttentionKernels
from attn_variants.attention.layer import SpecLayer
from attn_variants.attention.step import cos_sin_of_batch
from attn_variants.compute.pairs import Pairs
from attn_variants.compute.plain import pairs_of

TILE = 64
"""The number of queries of whole sequences whose weights are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The size of the cache of a key/value head: `heavy` heavy hitters and the `recent` latest keys."""

    heavy: int
    recent: int

    @property
    def rows(self) -> int:
        """The number of keys that are kept."""
        return self.heavy + self.recent

    def evicted(self, accumulated: Tensor, positions: Tensor, newest: Tensor, present: Tensor) -> Tensor:
        """The index [...] of the key to evict: the one with the least accumulated attention that is not recent.

        Of equals, the oldest. `accumulated`, `positions` and `present` broadcast to [..., key]; `newest` [..., 1] is
        the position of the newest key.
        """
        free = present & (positions <= newest - self.recent)
        left = accumulated.masked_fill(~free, torch.inf)
        least = free & (left == left.amin(-1, keepdim=True))
        return positions.expand(least.shape).masked_fill(~least, torch.iinfo(positions.dtype).max).argmin(-1)


def by_group(heads: Heads, weights: Tensor) -> Tensor:
    """Sum weights [batch, heads, key] over the query heads of each key/value head: float32 [batch, num_kv_heads,
    key]."""
    return torch.unflatten(weights.detach(), 1, (heads.key_value, -1)).sum(2).float()


@torch.no_grad()
def last_queries(heads: Heads, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, budget: Budget) -> Tensor:
    """The last query that sees each key before its eviction, int64 [batch, num_kv_heads, token].

    It is the number of tokens for keys that are never evicted. `query` [batch, heads, token, size], pre-scaled, and
    `key` [batch, num_kv_heads, token, size] are those of whole sequences; `key_padding_mask` is bool [batch, token].
    Padding evicts nothing. Queries within the budget are computed at once, later ones one by one, as each depends on
    the evictions before it.
    """
    tokens = key.shape[2]
    last = torch.full(key.shape[:3], tokens, device=key.device)
    if tokens <= budget.rows:
        return last
    real = key.new_ones(key.shape[0], tokens).bool() if key_padding_mask is None else key_padding_mask
    positions = (real.long().cumsum(1) - 1)[:, None]
    here = torch.arange(tokens, device=key.device)
    accumulated = accumulated_by(heads, query[:, :, : budget.rows], key, key_padding_mask, last)
    along = of_query_heads(heads, key).transpose(-1, -2)
    for start in range(budget.rows, tokens, TILE):
        scores = query[:, :, start : start + TILE] @ along
        for token in range(start, min(start + TILE, tokens)):
            counts = real[:, None, token, None]
            kept = real[:, None] & (here <= token) & (last == tokens)
            weights = shares(scores[:, :, token - start], of_query_heads(heads, kept))
            accumulated = accumulated + by_group(heads, weights) * counts
            full = counts & (kept.sum(-1, keepdim=True) > budget.rows)
            out = budget.evicted(accumulated, positions, positions[..., token, None], kept)
            last = last.masked_fill(full & (here == out[..., None]), token)
    return last


def accumulated_by(heads: Heads, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, last: Tensor) -> Tensor:
    """The attention that each key gets from the first queries, before any eviction: float32 [batch, num_kv_heads,
    key]."""
    accumulated = torch.zeros(key.shape[:3], dtype=torch.float32, device=key.device)
    for start in range(0, query.shape[2], TILE):
        some = query[:, :, start : start + TILE]
        weights = kept_weights(heads, some, key, key_padding_mask, last, start)
        if key_padding_mask is not None:
            weights = weights * key_padding_mask[:, None, start : start + some.shape[2], None]
        accumulated = accumulated + by_group(heads, weights.sum(2))
    return accumulated


def kept_weights(
    heads: Heads, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, last: Tensor, first: int = 0
) -> Tensor:
    """Weights [batch, heads, query, key] over the keys that are not evicted.

    Queries are [batch, heads, query, size], starting at position `first`; `last` is the result of `last_queries`, whose
    docstring describes the other arguments."""
    here = torch.arange(key.shape[2], device=key.device)
    positions = here[first : first + query.shape[2], None]
    seen = (here <= positions) & (positions <= last[:, :, None])
    if key_padding_mask is not None:
        seen = seen & key_padding_mask[:, None, None]
    return shares(query @ of_query_heads(heads, key).transpose(-1, -2), of_query_heads(heads, seen))


class NewTokens(NamedTuple):
    """One new token of each request: `query` [requests, heads, size], `key` and `value` [requests, num_kv_heads, size],
    and the number of tokens before it, `earlier` [requests]."""

    query: Tensor
    key: Tensor
    value: Tensor
    earlier: Tensor

    def of(self, positions: Tensor) -> NewTokens:
        """Select the tokens at these indices."""
        return NewTokens(*(part[positions] for part in self))


class HeavyHitterLayer(SpecLayer):
    """Causal attention that keeps the latest keys and those that were attended to most.

    For whole sequences, it first computes when each key is evicted and then attends in tiles of queries; in decoding,
    the cache holds only the kept keys and values.
    """

    only_spec = False
    own_positions = True
    computes_itself = True

    def __init__(self, spec: AttentionSpec, budget: Budget, *, hidden_size: int, bias: bool) -> None:
        super().__init__(spec, hidden_size=hidden_size, bias=bias)
        self.budget = budget

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        pairs = pairs_of(self.spec, self._operands(query, source, key_padding_mask, shared_kv))
        return kept_weights(self.spec.heads, *self.scaled(pairs), self.last_queries(pairs))

    def scaled(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scaled queries, keys, and the padding mask."""
        return pairs.query * pairs.query.shape[-1] ** -0.5, pairs.key, pairs.operands.key_padding_mask

    def last_queries(self, pairs: Pairs) -> Tensor:
        """The last query that sees each key before its eviction, [batch, num_kv_heads, token]."""
        return last_queries(self.spec.heads, *self.scaled(pairs), self.budget)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests, token by token.

        Returns [tokens, hidden_size]. Reads and replaces the state "kept": "key" and "value" [requests, num_kv_heads,
        rows, size], "accumulated" and "position" [requests, num_kv_heads, rows], in any order; rows beyond the number
        of tokens are unused.
        """
        new = NewTokens(*self.project(query, cos_sin_of_batch(self, query, batch)), batch.positions)
        kept = state["kept"].read()
        if batch.decoding:
            out, kept = self.attend_token(new, kept)
        else:
            out = new.query.new_empty(*new.query.shape[:-1], self.spec.heads.value_size)
            for offset in range(max(batch.lengths)):
                rows = (batch.offset_of == offset).nonzero()[:, 0]
                requests = batch.request_of[rows]
                out[rows], after = self.attend_token(
                    new.of(rows), {name: part[requests] for name, part in kept.items()}
                )
                kept = {name: part.index_copy(0, requests, after[name]) for name, part in kept.items()}
        state["kept"].write(kept)
        return self.output(out.flatten(-2))  # type: ignore[no-any-return]

    def attend_token(self, new: NewTokens, kept: Fields) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs [requests, heads, value_size] over the kept keys and the new one, and the state after this token."""
        heads, count = self.spec.heads, new.earlier[:, None, None]
        token = {"key": new.key, "value": new.value, "accumulated": new.key.new_zeros(new.key.shape[:2])}
        token["position"] = count[..., 0].expand(-1, heads.key_value)
        extended = {name: torch.cat([part, token[name][:, :, None].to(part.dtype)], 2) for name, part in kept.items()}
        # Rows are filled in order and then replaced; the new token is the last row.
        rows = torch.arange(self.budget.rows + 1, device=count.device)
        present = (rows < count) | (rows == self.budget.rows)
        weights = self._kept_row_weights(new.query, extended["key"], present)
        value = of_query_heads(heads, wide(extended["value"]))
        out = (weights[:, :, None] @ value)[:, :, 0].to(new.value.dtype)
        extended["accumulated"] = extended["accumulated"] + by_group(heads, weights)
        victim = self.budget.evicted(extended["accumulated"], extended["position"], count, present)[..., None]
        target = torch.where(count < self.budget.rows, count, victim)
        return out, {name: _replaced(part, target) for name, part in extended.items()}

    def _kept_row_weights(self, query: Tensor, key: Tensor, present: Tensor) -> Tensor:
        """Weights [requests, heads, row] of queries [requests, heads, size] over keys [requests, num_kv_heads, row,
        size]."""
        along = of_query_heads(self.spec.heads, wide(key))
        found = (wide(query)[:, :, None] * query.shape[-1] ** -0.5) @ along.transpose(-1, -2)
        return shares(found[:, :, 0], present)

    def _attend(self, rows: Tensor, operands: AttentionInputs, kernels: AttentionKernels) -> Tensor:  # noqa: ARG002 -- no kernel can
        pairs = pairs_of(self.spec, operands)
        query, key, key_padding_mask = self.scaled(pairs)
        value, last = of_query_heads(self.spec.heads, wide(operands.value).transpose(1, 2)), self.last_queries(pairs)

        def tile(some: Tensor, first: int) -> Tensor:
            return kept_weights(self.spec.heads, some, key, key_padding_mask, last, first) @ value

        # Weights are recomputed in the backward pass, so that memory holds one tile of them at a time.
        again = query.shape[2] > TILE and torch.is_grad_enabled()
        cut = [(some, TILE * number) for number, some in enumerate(torch.split(query, TILE, dim=2))]
        out = torch.cat([checkpoint(tile, *one, use_reentrant=False) if again else tile(*one) for one in cut], dim=2)
        return out.transpose(1, 2).to(operands.value.dtype)


def _replaced(rows: Tensor, target: Tensor) -> Tensor:
    """Move the last row of [requests, heads, row, ...] to row `target` [requests, heads, 1], leaving one row fewer."""
    last, others = rows[:, :, -1:], rows[:, :, :-1]
    positions = target.expand((*others.shape[:2], 1))
    if rows.dim() == 4:
        positions = positions[..., None].expand(-1, -1, -1, rows.shape[-1])
    return others.scatter(2, positions, last)
