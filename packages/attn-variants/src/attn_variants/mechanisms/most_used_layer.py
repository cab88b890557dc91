"""The layer of compressive memory that keeps the tokens most attended to."""

from __future__ import annotations

import torch
from attn_core import Fields, LayerState, RaggedBatch
from torch import Tensor

from attn_variants.mechanisms.compressive_layer import CompressiveLayer, attention_weights, read


class MostUsedLayer(CompressiveLayer):
    """Compressive memory whose compressed rows are the uncompressed tokens with the most attention.

    Learned: `query`, `key`, `value` and `output` (`nn.Linear`, Glorot-uniform).

    When tokens leave the memory, one of every `rate` is kept: those with the largest attention weight, averaged over
    the heads and over the queries that saw them (Rae et al. 2020, section 3.1, "most-used"), in their original order.
    The choice has no gradient. Segments are computed one after the other, as each determines what later ones see.
    """

    def _by_segments(self, rows: Tensor, real: Tensor, projected: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Outputs [batch, token, heads, size] of projected queries, keys and values of the same shape."""
        past, length = self.past, rows.shape[1]
        queries, key, value = projected
        each = torch.arange(rows.shape[0], device=rows.device)[:, None]
        places = torch.arange(length, device=rows.device)
        used, until = torch.zeros_like(real), real.cumsum(1)
        kept, out = places.new_zeros(rows.shape[0], 0), []
        for start in range(0, length, past.segment):
            first, stop = max(0, start - past.memory), min(start + past.segment, length)
            far = kept[:, -past.compressed :]
            seen = torch.cat([far, places[first:stop].expand(rows.shape[0], -1)], dim=1)
            near = past.near(places[start:stop, None], places[first:stop])
            allowed = torch.cat([near.new_ones(stop - start, far.shape[1]), near], dim=1)
            allowed = allowed & (real[each, seen] > 0)[:, None]
            weights = attention_weights(queries[:, start:stop], key[each, seen], allowed)
            out.append(read(weights, value[each, seen]))
            counted = weights.detach()[..., far.shape[1] :] * real[:, None, start:stop, None]
            used[:, first:stop] += counted.sum((1, 2)).to(used.dtype)
            leaving = slice(max(0, stop - past.window), max(0, stop - past.memory))
            if stop == start + past.segment and leaving.stop:
                readers = until[:, stop - 1, None] - until[:, leaving] + real[:, leaving]
                average = (used[:, leaving] / readers.clamp(min=1)).masked_fill(real[:, leaving] == 0, -1)
                kept = torch.cat([kept, leaving.start + most_used(average, past.rate)], dim=1)
        return torch.cat(out, dim=1)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests, one request at a time.

        Returns [tokens, hidden_size]. Extends the state "kv" and replaces the state "compressed": "key" and "value"
        [requests, compressed, heads, size], the kept tokens, the newest last, and "usage" [requests, window], the sum
        of the attention weights of each token in the window, at its position modulo the window.
        """
        queries, key, value = (self._split(linear, query) for linear in (self.query, self.key, self.value))
        state["kv"].append({"key": key, "value": value})
        held, out, after = state["compressed"].read(), [], []
        for span in batch.spans():
            near = state["kv"].rows([span.request])
            known = near.positions[0]
            if near.key_padding_mask is not None:
                known = known.masked_fill(~near.key_padding_mask[0], -1)
            mine: Fields = {name: rows[span.request] for name, rows in held.items()}
            at, place = span.start, batch.contexts[span.request]
            while at < span.stop:
                border = (place // self.past.segment + 1) * self.past.segment
                count = min(span.stop - at, border - place)
                made, mine = self._piece(queries[at : at + count], place, near.fields, known, mine)
                out.append(made)
                at, place = at + count, place + count
            after.append(mine)
        state["compressed"].write({name: torch.stack([kept[name] for kept in after]) for name in held})
        return self._out(torch.cat(out), query)

    def _piece(self, queries: Tensor, place: int, near: Fields, known: Tensor, held: Fields) -> tuple[Tensor, Fields]:
        """Outputs [query, heads, size] of queries within one segment, from position `place` on, and the new state.

        `near` contains "key" and "value" [1, token, heads, size] of tokens at the positions `known` [token], -1 for no
        token.
        """
        past, stop = self.past, place + queries.shape[0]
        kept_count = min(past.compressed, max(0, place // past.segment * past.segment - past.memory) // past.rate)
        last = past.compressed - kept_count
        places = torch.arange(place, stop, device=queries.device)[:, None]
        seen = past.near(places, known) & (known >= 0)
        allowed = torch.cat([seen.new_ones(len(places), kept_count), seen], dim=1)
        far = {name: held[name][last:].to(near[name].dtype) for name in ("key", "value")}
        keys, values = (torch.cat([rows, near[name][0]])[None] for name, rows in far.items())
        weights = attention_weights(queries[None], keys, allowed[None])
        counted = weights[0, ..., kept_count:].sum((0, 1)).to(held["usage"].dtype)
        used = held["usage"].index_add(0, known.clamp(min=0) % past.window, counted)
        kept = {**held, "usage": used}
        first, end = max(0, stop - past.window), max(0, stop - past.memory)
        if stop % past.segment == 0 and end:
            leaving = torch.arange(first, end, device=queries.device)
            slots = leaving % past.window
            chosen = leaving[most_used(used[slots] / (stop - leaving), past.rate)]
            rows = (known == chosen[:, None]).to(torch.int8).argmax(1)
            for name in ("key", "value"):
                kept[name] = torch.cat([held[name], near[name][0, rows].to(held[name].dtype)])[-past.compressed :]
            kept["usage"] = used.index_fill(0, slots, 0.0)
        return read(weights, values)[0], kept


def most_used(usage: Tensor, rate: int) -> Tensor:
    """The indices, ascending, of the largest 1 / `rate` of the usages [..., token]; of equal ones, the first."""
    order = usage.sort(dim=-1, descending=True, stable=True).indices
    return order[..., : usage.shape[-1] // rate].sort(dim=-1).values
