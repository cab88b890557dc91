"""The layers of policies over a KV cache: which rows stay, and which pages a query reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, Fields, InnerAttention, LayerState, RaggedBatch
from attn_core.masking import allowed_pairs, of_query_heads, positions, wide
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, pad

from attn_variants.attention.kernels import AttentionKernels
from attn_variants.attention.layer import SpecLayer
from attn_variants.attention.step import cos_sin_of_batch
from attn_variants.compute.distribution import distribute
from attn_variants.compute.modifiers import modify
from attn_variants.compute.pairs import Pairs
from attn_variants.compute.plain import summed
from attn_variants.mechanisms.common import Schedule
from attn_variants.scores import scores


@dataclass(frozen=True, eq=False)
class KeptPairs(Pairs):
    """Pairs with rows whose positions and presence differ by head: `at` of queries and rows, `present` of rows."""

    at: tuple[Tensor, Tensor]
    present: Tensor

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Positions of queries [1, 1, query, 1] and of rows [batch, heads, 1, row]."""
        return self.at

    @property
    def allowed(self) -> Tensor:
        """Bool [batch, heads, query, row]."""
        return self.present & (self.at[0] >= self.at[1])


@dataclass(frozen=True, eq=False)
class ChosenPairs(Pairs):
    """Pairs of which only those that are `seen` [batch, heads, query, key] are allowed."""

    seen: Tensor

    @property
    def allowed(self) -> Tensor:
        """Bool [batch, heads, query, key]."""
        return self.seen & allowed_pairs(self.spec.mask, self.operands)


class EvictingLayer(SpecLayer):
    """Attention over a cache from which rows leave by a `Schedule`, in whole sequences as in steps.

    A piece of a sequence ends where rows leave; its queries attend to the kept rows and to its own tokens. No gradient
    flows through the choice.
    """

    only_spec = False
    own_positions = True
    computes_itself = True

    def __init__(self, spec: AttentionSpec, schedule: Schedule, *, hidden_size: int, bias: bool) -> None:
        super().__init__(spec, hidden_size=hidden_size, bias=bias)
        self.schedule = schedule

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        operands = self._operands(query, source, key_padding_mask, shared_kv)
        tokens, found = query.shape[1], []
        for weights, kept in self._whole(operands):
            places = of_query_heads(self.spec.heads, kept["position"])[:, :, None].expand(weights.shape).long()
            found.append(weights.new_zeros(*weights.shape[:3], tokens).scatter(-1, places, weights))
        return torch.cat(found, 2)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests, one request at a time.

        Returns [tokens, hidden_size]. Reads and replaces the state "kept": "key" and "value" [requests, num_kv_heads,
        rows, size] and, where there are, "votes" and "position" [requests, num_kv_heads, rows], in order of position;
        rows beyond those that the schedule keeps are unused.
        """
        projected = self.project(query, cos_sin_of_batch(self, query, batch))
        held, out, after = state["kept"].read(), [], []
        for span in batch.spans():
            new = [part[None, span.start : span.stop] for part in projected]
            start = batch.contexts[span.request]
            filled = self.schedule.filled(start)
            mine = {"votes": held["key"].new_zeros(held["key"].shape[:3]).float(), **held}
            mine = {name: rows[span.request : span.request + 1, :, :filled] for name, rows in mine.items()}
            # Without biases the positions of kept rows change nothing; where rows leave each time, no votes are kept.
            blank = torch.zeros_like(mine["votes"])
            kept: Fields = {"position": blank.int(), **mine, "real": ~blank.bool()}
            for weights, rows in self._pieces(new, kept, start, new[0].new_ones(new[0].shape[:2]).bool()):
                out.append(self._read(weights, rows)[0])
                kept = rows
            after.append(self._left(kept, start + span.stop - span.start))
        filled_up = {}
        for name, rows in held.items():
            blank = torch.zeros_like(rows)
            for number, kept in enumerate(after):
                blank[number, :, : kept[name].shape[2]] = kept[name][0].to(rows.dtype)
            filled_up[name] = blank
        state["kept"].write(filled_up)
        return self.output(torch.cat(out).flatten(-2).to(query.dtype))  # type: ignore[no-any-return]

    def _attend(self, rows: Tensor, operands: AttentionInputs, kernels: AttentionKernels) -> Tensor:  # noqa: ARG002 -- no kernel can
        found = [self._read(*each) for each in self._whole(operands)]
        heads = self.spec.heads
        return (
            torch.cat(found, 1) if found else operands.value.new_empty(*rows.shape[:2], heads.query, heads.value_size)
        )

    def _whole(self, operands: AttentionInputs) -> Iterator[tuple[Tensor, Fields]]:
        new = [operands.query, operands.key, operands.value]
        given, empty = operands.key_padding_mask, operands.key[:, :0].transpose(1, 2)
        real = new[1].new_ones(new[1].shape[:2]).bool() if given is None else given
        kept = {"key": empty, "value": operands.value[:, :0].transpose(1, 2), "votes": empty[..., 0].float()}
        kept |= {"position": empty[..., 0].int(), "real": empty[..., 0].bool()}
        return self._pieces(new, kept, 0, real)

    def _pieces(self, new: Sequence[Tensor], kept: Fields, start: int, real: Tensor) -> Iterator[tuple[Tensor, Fields]]:
        """The weights [batch, heads, query, row] of each piece, and its rows with their votes, before any leaves.

        `new` are queries, keys and values [batch, token, heads, size] of the tokens from position `start` on; `real`
        [batch, token] is False for padding. `kept` is as in `step`, with "real" for each row.
        """
        first = start
        for begin, end in self.schedule.pieces(start, start + new[0].shape[1]):
            kept = self._left(kept, begin)
            taken = slice(begin - first, end - first)
            query, key, value = (part[:, taken] for part in new)
            places = torch.arange(begin, end, device=query.device)
            rows = self._extended(kept, key, value, places, real[:, taken])
            weights = self._weights(query, places, rows)
            # The queries of the last `window` tokens before rows leave.
            late = places >= (begin // self.schedule.interval + 1) * self.schedule.interval - self.schedule.window
            counted = weights.detach() * (late & real[:, taken])[:, None, :, None]
            votes = torch.unflatten(counted.sum(2), 1, (self.spec.heads.key_value, -1)).sum(2).float()
            rows["votes"] = rows["votes"] + (votes.sum(1, keepdim=True) if self.schedule.together else votes)
            yield weights, rows
            kept = rows

    def _extended(self, kept: Fields, key: Tensor, value: Tensor, places: Tensor, real: Tensor) -> dict[str, Tensor]:
        shape = key.shape[0], key.shape[2], key.shape[1]
        new = {"key": key.transpose(1, 2), "value": value.transpose(1, 2), "real": real[:, None].expand(shape)}
        new |= {"votes": key.new_zeros(shape), "position": places.expand(shape)}
        joined = {name: torch.cat([kept[name].to(new[name].dtype), new[name]], 2) for name in ("key", "value")}
        return joined | {
            name: torch.cat([kept[name], new[name].to(kept[name].dtype)], 2) for name in ("votes", "position", "real")
        }

    def _weights(self, query: Tensor, places: Tensor, rows: Fields) -> Tensor:
        heads = self.spec.heads
        key = wide(rows["key"])
        at = places[None, None, :, None], of_query_heads(heads, rows["position"])[:, :, None].long()
        inputs = AttentionInputs(query=query, key=key, value=key, parameters=self.part_weights())
        present = of_query_heads(heads, rows["real"])[:, :, None]
        pairs = KeptPairs(self.spec, wide(query).transpose(1, 2), key, inputs, at, present)
        return distribute(pairs, modify(pairs, scores(pairs)))

    def _read(self, weights: Tensor, rows: Fields) -> Tensor:
        """Outputs [batch, query, heads, value_size]."""
        value = rows["value"]
        return (weights @ of_query_heads(self.spec.heads, wide(value))).transpose(1, 2).to(value.dtype)

    @torch.no_grad()
    def _chosen(self, rows: Fields) -> Tensor:
        """The rows that stay, [batch, num_kv_heads, budget], in order."""
        schedule = self.schedule
        votes, real = rows["votes"][..., : -schedule.window], rows["real"][..., : -schedule.window]
        pooled = avg_pool1d(votes, schedule.pool, 1, schedule.pool // 2) if schedule.pool > 1 else votes
        ranked = pooled.masked_fill(~real, -1.0)
        # Of equal ones, the newest stay.
        order = ranked.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        best = ranked.shape[-1] - 1 - order[..., : schedule.budget - schedule.window]
        last = torch.arange(ranked.shape[-1], rows["votes"].shape[-1], device=best.device)
        return torch.cat([best.sort(-1).values, last.expand(*best.shape[:2], -1)], -1)

    def _left(self, rows: Fields, tokens: int) -> Fields:
        """The rows that are left of those before `tokens`, without votes where rows have just left or could have."""
        schedule = self.schedule
        if tokens == 0 or tokens % schedule.interval:
            return rows
        if rows["votes"].shape[-1] > schedule.budget:
            index = self._chosen(rows)
            rows = {
                name: part.gather(
                    2, index if part.dim() == 3 else index[..., None].expand(*index.shape, part.shape[-1])
                )
                for name, part in rows.items()
            }
        return {**rows, "votes": torch.zeros_like(rows["votes"])}


class PagesInner(InnerAttention, nn.Module):
    """Each query attends to its own page of `block` keys and to the `top` - 1 earlier ones with the largest bounds."""

    computes_itself = True
    reads_rows = False

    def __init__(self, spec: AttentionSpec, *, block: int, top: int) -> None:
        super().__init__()
        self.spec, self.block, self.top = spec, block, top

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]."""
        return summed(self.spec, operands, self.weights(rows, operands, attend))

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Attention weights [batch, heads, query, key], zero outside the chosen pages."""
        if not operands.key.shape[1]:
            return wide(operands.query).transpose(1, 2)[..., :0]
        query, key = (wide(part).transpose(1, 2) for part in (operands.query, operands.key))
        pairs = ChosenPairs(self.spec, query, key, operands, self._seen(operands))
        return distribute(pairs, modify(pairs, scores(pairs)))

    @torch.no_grad()
    def _seen(self, operands: AttentionInputs) -> Tensor:
        """Bool [batch, heads, query, key], True for the keys of chosen pages."""
        own = (positions(operands)[0] // self.block)[:, None, :, None]
        lowest, highest, real = self._bounds(operands)
        query = wide(operands.query).transpose(1, 2)
        bounds = query.clamp(min=0) @ highest.mT + query.clamp(max=0) @ lowest.mT
        pages = torch.arange(bounds.shape[-1], device=bounds.device)
        past = (pages < own) & real[:, None, None]
        best = bounds.masked_fill(~past, -torch.inf).topk(min(self.top - 1, bounds.shape[-1]), dim=-1)
        chosen = torch.zeros_like(bounds, dtype=torch.bool).scatter(-1, best.indices, value=True)
        chosen = chosen & past | (pages == own)
        return chosen.repeat_interleave(self.block, -1)[..., : operands.key.shape[1]]

    def _bounds(self, operands: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The least and the largest element of the keys of each page, [batch, heads, page, size], and whether it has
        any key, [batch, page]."""
        key, given = wide(operands.key), operands.key_padding_mask
        real = key.new_ones(key.shape[:2]).bool() if given is None else given
        missing = -key.shape[1] % self.block
        key, real = pad(key, (0, 0, 0, 0, 0, missing)), pad(real, (0, missing))
        pages = torch.unflatten(of_query_heads(self.spec.heads, key.transpose(1, 2)), 2, (-1, self.block))
        real = torch.unflatten(real, 1, (-1, self.block))
        hidden, most = ~real[:, None, ..., None], torch.finfo(key.dtype).max
        any_key = real.any(-1)
        none = ~any_key[:, None, :, None]
        lowest = pages.masked_fill(hidden, most).amin(3).masked_fill(none, 0)
        highest = pages.masked_fill(hidden, -most).amax(3).masked_fill(none, 0)
        return lowest, highest, any_key
