"""The layer of attention to a window and to compressed entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attn_core import Fields, LayerState, RaggedBatch
from attn_core.batch import Rows
from attn_core.errors import InvalidValue
from attn_core.joint import weight_of
from attn_core.masking import shares, wide
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_sparse.blocks import CompletedBlocks
from attn_sparse.compressed.compressor import Compressor, EntryIndexer, turn_last
from attn_sparse.compressed.options import CompressedConfig
from attn_sparse.dsa.indexer import divergence
from attn_sparse.dsa.selection import PIECE, LearnsFromAttention, choose, places_of, taken

NONE = -(1 << 40)
"""The position of a row that no query sees."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Queries [batch, query, heads, size], scaled, at least float32, their `positions` [batch, query], and what the
    indexer asks; None without one."""

    query: Tensor
    positions: Tensor
    index: tuple[Tensor, Tensor] | None

    def at(self, part: slice) -> Asked:
        """Some of the queries."""
        index = None if self.index is None else (self.index[0][:, part], self.index[1][:, part])
        return Asked(self.query[:, part], self.positions[:, part], index)


@dataclass(frozen=True, eq=False)
class Seen:
    """Rows [batch, row, size], keys and values at once, with `positions` [batch or 1, row], `NONE` for padding."""

    rows: Tensor
    positions: Tensor
    index: Tensor | None = None

    @classmethod
    def of(cls, rows: Rows) -> Seen:
        """The cached rows of a state with a field "entry" and perhaps one "index"."""
        kept = rows.key_padding_mask
        places = rows.positions if kept is None else rows.positions.where(kept, NONE)
        return cls(rows.fields["entry"], places, rows.fields.get("index"))

    def at(self, part: slice) -> Seen:
        """Some of the rows."""
        return Seen(self.rows[:, part], self.positions[:, part], None if self.index is None else self.index[:, part])


class CompressedLayer(LearnsFromAttention, nn.Module):
    """Attention to the last tokens and to compressed entries of all earlier ones, whose rows are keys and values at
    once, beside a learned logit per head that takes weight without a value (DeepSeek-AI 2026).

    Learned: `query_down`, `query_norm`, `query_up`, `entry`, `entry_norm`, `sinks` [heads], `output_down`, whose matrix
    is that of each group of heads, one below the other, `output`, and `compressor` and `indexer` where there are
    entries.
    """

    read_weights = ("output_down",)
    """The linear layers whose matrices are read by `weight_of`, without calling the layers."""

    def __init__(self, options: CompressedConfig) -> None:
        super().__init__()
        self.options = options
        width, size = options.hidden_size, options.size
        self.query_down = nn.Linear(width, options.query_latent, bias=False)
        self.query_norm = nn.RMSNorm(options.query_latent, eps=options.norm_eps)
        self.query_up = nn.Linear(options.query_latent, options.heads_width, bias=False)
        self.entry = nn.Linear(width, size, bias=False)
        self.entry_norm = nn.RMSNorm(size, eps=options.norm_eps)
        self.sinks = nn.Parameter(torch.zeros(options.num_heads))
        grouped = options.output_groups * options.output_latent
        self.output_down = nn.Linear(options.heads_width // options.output_groups, grouped, bias=False)
        self.output = nn.Linear(grouped, width, bias=False)
        self.compressor = None if options.every is None else Compressor(options, size)
        self.indexer = EntryIndexer(options) if options.indexed else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute whole sequences, [batch, tokens, hidden_size] to [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real; blocks are counted from the first row.
        Raises `InvalidValue` if a source is given.
        """
        if source is not None:
            raise InvalidValue.of("source", tuple(source.shape), "None, as 'compressed' is self-attention")
        places = torch.arange(query.shape[1], device=query.device).expand(query.shape[0], -1)
        kept = torch.ones_like(places, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        near = Seen(self._entries(query, places), places.where(kept, NONE))
        pieces = self._in_pieces(self._asked(query, places), near, self._far(self._projected(query), kept))
        out, *far = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
        if far:
            self.keep_divergence(far[0], key_padding_mask)
        return self._out(out, query.dtype)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, hidden_size] to [tokens, hidden_size].

        Appends to the states "window", "open" (the projections of the tokens of blocks that are not complete) and
        "compressed" (an entry for each block that this step completes).
        """
        asked = self._asked(query[None], batch.positions[None])
        near = state["window"].append({"entry": self._entries(query[None], batch.positions[None])[0]})
        if self.compressor is not None:
            state["open"].append({name: rows[0] for name, rows in self._projected(query[None]).items()})
            state["compressed"].append(self._completed(query, batch, state["open"]))
        views = [state[name] for name in ("window", "compressed") if name in state]
        if batch.decoding:
            single = Asked(asked.query[0, :, None], asked.positions[0, :, None], _single(asked.index))
            return self._out(self._read(single, *self._cached(views, range(batch.requests)))[0][:, 0], query.dtype)
        outs = []
        for span in batch.spans():
            at = slice(span.start, span.stop)
            seen, part = self._cached(views, [span.request]), asked.at(at)
            if batch.contexts[span.request] == 0 and span.stop - span.start > 1:
                seen = Seen(near["entry"][None, at], part.positions), seen[1]
                outs.append(torch.cat([piece[0] for piece in self._in_pieces(part, *seen)], dim=1)[0])
            else:
                outs.append(self._read(part, *seen)[0][0])
        return self._out(torch.cat(outs), query.dtype)

    def _asked(self, rows: Tensor, places: Tensor) -> Asked:
        """What rows [batch, tokens, hidden_size] at these positions ask for."""
        latent = self.query_norm(self.query_down(rows))
        query = wide(torch.unflatten(self.query_up(latent), -1, (self.options.num_heads, -1)))
        normed = nn.functional.rms_norm(query, query.shape[-1:], eps=self.options.norm_eps)
        index = None if self.indexer is None else self.indexer.asked(rows, latent, places)
        return Asked(self._turned(normed, places) * self.options.size**-0.5, places, index)

    def _entries(self, rows: Tensor, places: Tensor) -> Tensor:
        """The rows [batch, tokens, size] that tokens are attended to by, as long as they are within the window."""
        return self._turned(self.entry_norm(self.entry(rows))[:, :, None], places)[:, :, 0]

    def _projected(self, rows: Tensor) -> Fields:
        """What compressed entries are mixed from, [batch, tokens, parts · size] each; nothing without entries."""
        found: dict[str, Tensor] = {}
        if self.compressor is not None:
            found = {"value": self.compressor.value(rows), "gate": self.compressor.gate(rows)}
        if self.indexer is not None:
            index, rows = self.indexer.compressor, rows.detach()
            found |= {"index_value": index.value(rows), "index_gate": index.gate(rows)}
        return found

    def _far(self, projected: Fields, kept: Tensor) -> Seen | None:
        """The entries of whole sequences; those of blocks without a real token are padding."""
        every = self.options.every
        if self.compressor is None or every is None:
            return None
        blocks = kept.shape[1] // every
        if self.options.overlap:
            projected = {name: nn.functional.pad(rows, (0, 0, every, 0)) for name, rows in projected.items()}
            kept = nn.functional.pad(kept, (every, 0))
        length = (blocks + self.options.overlap) * every
        kept = kept[:, :length]
        first = torch.zeros(len(kept), dtype=torch.int64, device=kept.device)
        fields = self._mixed({name: rows[:, :length] for name, rows in projected.items()}, kept, first)
        real = torch.unflatten(kept, 1, (blocks + self.options.overlap, every)).any(-1)[:, int(self.options.overlap) :]
        ends = torch.arange(1, blocks + 1, device=kept.device) * every - 1
        return Seen(fields["entry"], ends.expand(len(kept), -1).where(real, NONE), fields.get("index"))

    def _mixed(self, projected: Fields, real: Tensor, first: Tensor) -> dict[str, Tensor]:
        """The entries of consecutive blocks, and their index keys; see `Compressor`."""
        found: dict[str, Tensor] = {}
        if self.compressor is not None:
            found["entry"] = self.compressor(projected["value"], projected["gate"], real, first)
        if self.indexer is not None:
            parts = projected["index_value"], projected["index_gate"]
            found["index"] = self.indexer.compressor(*parts, real, first)
        return found

    def _completed(self, query: Tensor, batch: RaggedBatch, view: Any) -> Fields:
        """The entries of the blocks that this step completes, in batch order, from the rows of the state "open"."""
        every = self.options.every or 1
        blocks = CompletedBlocks.of(batch, view, every, every * self.options.overlap)
        if blocks is None:
            sizes = {"entry": self.options.size} | ({} if self.indexer is None else {"index": self.options.index_size})
            return {name: query.new_zeros(0, size) for name, size in sizes.items()}
        return blocks.in_order(self._mixed(blocks.fields, blocks.real, blocks.first), query.dtype)

    def _cached(self, views: Sequence[Any], requests: Sequence[int]) -> tuple[Seen, Seen | None]:
        found = [Seen.of(view.rows(requests)) for view in views]
        return found[0], found[1] if len(found) > 1 else None

    def _in_pieces(self, asked: Asked, near: Seen, far: Seen | None) -> list[tuple[Tensor, ...]]:
        """What `_read` returns for whole sequences, `window` queries at a time, which see few of the rows."""
        tokens, window = asked.positions.shape[1], self.options.window
        if torch.compiler.is_compiling() or tokens <= window:
            return [self._read(asked, near, far)]
        keys = len(asked.positions) * self.options.num_heads * (2 * window + self.options.entries(tokens))
        length, found = max(1, min(window, PIECE // max(1, keys))), []
        for start in range(0, tokens, length):
            stop = min(start + length, tokens)
            part = asked.at(slice(start, stop)), near.at(slice(max(0, start - window + 1), stop))
            seen = None if far is None else far.at(slice(0, self.options.entries(stop)))
            again = torch.is_grad_enabled()
            # Scores are not stored for the backward pass, which recomputes them piece by piece.
            found.append(checkpoint(self._read, *part, seen, use_reentrant=False) if again else self._read(*part, seen))
        return found

    def _read(self, asked: Asked, near: Seen, far: Seen | None) -> tuple[Tensor, ...]:
        """Outputs [batch, query, heads, size] of attention to these rows; if the indexer learns, also its divergence
        from the attention to the entries, [batch, query]."""
        rows, allowed = self._near(asked, near)
        scores, seen = None, allowed[:, :, :0]
        if far is not None and far.rows.shape[1]:
            entries, (seen, scores) = far.rows, self._chosen(asked, far)
            top = self.options.top
            if seen.shape[1] == 1 and top is not None and entries.shape[1] > top and not self.learns:
                places, real = places_of(seen[:, 0], top)
                entries, seen = taken(entries, places), real[:, None]
            rows, allowed = torch.cat([rows, wide(entries)], 1), torch.cat([allowed, seen], 2)
        weights = self._weights(asked, rows, allowed)
        out = self._attended(asked, rows, weights)
        if not self.learns or self.indexer is None:
            return (out,)
        if scores is None:
            return out, out[:, :, 0, 0].detach() * 0.0
        shared = weights.detach()[..., -seen.shape[2] :].mean(1)
        shared = shared / shared.sum(-1, keepdim=True).clamp(min=torch.finfo(shared.dtype).tiny)
        return out, divergence(scores, shared[:, None], seen)

    def _near(self, asked: Asked, near: Seen) -> tuple[Tensor, Tensor]:
        """The rows of tokens, and which of them queries see, [batch, query, row]."""
        query, key = asked.positions[:, :, None], near.positions[:, None]
        return wide(near.rows), (key <= query) & (key > query - self.options.window)

    def _chosen(self, asked: Asked, far: Seen) -> tuple[Tensor, Tensor | None]:
        """Which entries queries attend to, and their index scores, if there are any, [batch, query, entry] both."""
        seen = (far.positions[:, None] <= asked.positions[:, :, None]) & (far.positions[:, None] != NONE)
        if self.indexer is None or asked.index is None or far.index is None or self.options.top is None:
            return seen, None
        scores = self.indexer(asked.index, far.index)
        return choose(scores, seen, min(self.options.top, far.index.shape[1])), scores

    def _weights(self, asked: Asked, rows: Tensor, allowed: Tensor) -> Tensor:
        """Attention weights [batch, heads, query, row]; those of a query add up to less than one by its sink's."""
        heads, queries = self.options.num_heads, asked.query.shape[1]
        query = asked.query.transpose(1, 2).flatten(1, 2)
        scores = torch.unflatten(query @ rows.transpose(1, 2), 1, (heads, queries))
        sinks = wide(self.sinks)[:, None, None].expand(len(scores), -1, queries, 1).to(scores.dtype)
        kept = torch.nn.functional.pad(allowed, (0, 1), value=True)[:, None]
        return shares(torch.cat([scores, sinks], dim=-1), kept)[..., :-1]

    def _attended(self, asked: Asked, rows: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums of rows, whose rotary positions are turned back by those of the queries."""
        summed = torch.unflatten(weights.flatten(1, 2) @ rows, 1, weights.shape[1:3]).transpose(1, 2)
        return self._turned(summed, -asked.positions)

    def _turned(self, rows: Tensor, places: Tensor) -> Tensor:
        return turn_last(rows, places, self.options.rotary, self.options.turned(self.options.size))

    def _out(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        grouped = torch.unflatten(out.to(dtype).flatten(-2), -1, (self.options.output_groups, -1))
        down = torch.unflatten(weight_of(self.output_down), 0, (self.options.output_groups, -1))
        projected: Tensor = self.output(torch.einsum("...gi,gri->...gr", grouped, down).flatten(-2))
        return projected


def _single(index: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """What the indexer asks for [1, tokens] queries, as that of [tokens, 1] queries."""
    return None if index is None else (index[0][0, :, None], index[1][0, :, None])
