"""The layer of H2O, which keeps a budget of keys and values (Zhang et al. 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from attn_core import AttentionInputs, AttentionSpec, Fields, Heads, LayerState, RaggedBatch
from attn_core.masking import of_query_heads, shares, wide
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_variants.compute.pairs import Pairs
from attn_variants.compute.plain import pairs_of
from attn_variants.plan import KernelPlan
from attn_variants.spec_layer import SpecLayer
from attn_variants.stepping import cos_sin_of_batch

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


class Newest(NamedTuple):
    """One new token of each request: `query` [requests, heads, size], `key` and `value` [requests, key_value_heads,
    size], and how many tokens came before, `earlier` [requests]."""

    query: Tensor
    key: Tensor
    value: Tensor
    earlier: Tensor

    def of(self, places: Tensor) -> Newest:
        """The tokens at these rows."""
        return Newest(*(part[places] for part in self))


class HeavyLayer(SpecLayer):
    """Causal attention that keeps the latest keys and those that were attended to most.

    Whole sequences find out query by query when each key goes, and then meet what is left in tiles of queries; steps
    hold nothing else.
    """

    def __init__(self, spec: AttentionSpec, budget: Budget, *, hidden_size: int, bias: bool) -> None:
        super().__init__(spec, hidden_size=hidden_size, bias=bias)
        self.budget = budget

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        borrowed: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; arguments as of `forward`."""
        pairs = pairs_of(self.spec, self._operands(query, source, key_padding_mask, borrowed))
        return kept_weights(self.spec.heads, *self.scaled(pairs), self.last_queries(pairs))

    def scaled(self, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries times the scale, keys, and which are real."""
        return pairs.query * pairs.query.shape[-1] ** -0.5, pairs.key, pairs.operands.key_padding_mask

    def last_queries(self, pairs: Pairs) -> Tensor:
        """The last query that meets each key, [batch, key_value_heads, token]."""
        return last_queries(self.spec.heads, *self.scaled(pairs), self.budget)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, hidden_size] of many requests, token by token; returns [tokens,
        hidden_size].

        Reads and replaces the state "kept": "key" and "value" [requests, key_value_heads, rows, size], "gained" and
        "place" [requests, key_value_heads, rows], in no order; rows past the number of tokens mean nothing.
        """
        new = Newest(*self.project(query, cos_sin_of_batch(self, query, batch)), batch.positions)
        held = state["kept"].read()
        if batch.decoding:
            out, held = self.meet(new, held)
        else:
            out = new.query.new_empty(*new.query.shape[:-1], self.spec.heads.value_size)
            for offset in range(max(batch.lengths)):
                rows = (batch.offset_of == offset).nonzero()[:, 0]
                requests = batch.request_of[rows]
                out[rows], after = self.meet(new.of(rows), {name: part[requests] for name, part in held.items()})
                held = {name: part.index_copy(0, requests, after[name]) for name, part in held.items()}
        state["kept"].write(held)
        return self.output(out.flatten(-2))  # type: ignore[no-any-return]

    def meet(self, new: Newest, held: Fields) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs [requests, heads, value_size] over what is held and the new token, and what is held after it."""
        heads, count = self.spec.heads, new.earlier[:, None, None]
        token = {"key": new.key, "value": new.value, "gained": new.key.new_zeros(new.key.shape[:2])}
        token["place"] = count[..., 0].expand(-1, heads.key_value)
        met = {name: torch.cat([part, token[name][:, :, None].to(part.dtype)], 2) for name, part in held.items()}
        # Rows are filled in order, and only then replaced; the new token stands behind them all.
        rows = torch.arange(self.budget.rows + 1, device=count.device)
        present = (rows < count) | (rows == self.budget.rows)
        weights = self._shares(new.query, met["key"], present)
        value = of_query_heads(heads, wide(met["value"]))
        out = (weights[:, :, None] @ value)[:, :, 0].to(new.value.dtype)
        met["gained"] = met["gained"] + by_group(heads, weights)
        gone = self.budget.evicted(met["gained"], met["place"], count, present)[..., None]
        target = torch.where(count < self.budget.rows, count, gone)
        return out, {name: _replaced(part, target) for name, part in met.items()}

    def _shares(self, query: Tensor, key: Tensor, present: Tensor) -> Tensor:
        """Weights [requests, heads, row] of queries [requests, heads, size] over keys [requests, key_value_heads, row,
        size]."""
        along = of_query_heads(self.spec.heads, wide(key))
        found = (wide(query)[:, :, None] * query.shape[-1] ** -0.5) @ along.transpose(-1, -2)
        return shares(found[:, :, 0], present)

    def _attend(self, rows: Tensor, operands: AttentionInputs, plan: KernelPlan) -> Tensor:  # noqa: ARG002 -- no kernel can
        pairs = pairs_of(self.spec, operands)
        query, key, key_padding_mask = self.scaled(pairs)
        value, last = of_query_heads(self.spec.heads, wide(operands.value).transpose(1, 2)), self.last_queries(pairs)

        def tile(some: Tensor, first: int) -> Tensor:
            return kept_weights(self.spec.heads, some, key, key_padding_mask, last, first) @ value

        # Weights are made again for the gradient, so that no more than a tile of them is there at once.
        again = query.shape[2] > TILE and torch.is_grad_enabled()
        cut = [(some, TILE * number) for number, some in enumerate(torch.split(query, TILE, dim=2))]
        out = torch.cat([checkpoint(tile, *one, use_reentrant=False) if again else tile(*one) for one in cut], dim=2)
        return out.transpose(1, 2).to(operands.value.dtype)


def _replaced(rows: Tensor, target: Tensor) -> Tensor:
    """All rows [requests, heads, row, ...] but the last, which stands at `target` [requests, heads, 1]."""
    last, others = rows[:, :, -1:], rows[:, :, :-1]
    places = target.expand((*others.shape[:2], 1))
    if rows.dim() == 4:
        places = places[..., None].expand(-1, -1, -1, rows.shape[-1])
    return others.scatter(2, places, last)
