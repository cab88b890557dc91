"""The layer of compressive memory."""

from __future__ import annotations

import torch
from attn_core import Fields, Heads, LayerState, RaggedBatch
from attn_core.auxiliary_loss import KeepsAuxiliaryLoss
from attn_core.masking import shares, wide
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from attn_variants.attention.projections import refuse_source
from attn_variants.mechanisms.memory_sizes import MemorySizes


class CompressiveLayer(KeepsAuxiliaryLoss, nn.Module):
    """Attention over a segment, a memory of the tokens before it and a compressed memory of the tokens before that.

    Learned: `query`, `key`, `value`, `output` (`nn.Linear`, Glorot-uniform) and, for the pooling "convolution", `mix`
    (`nn.Linear` from `rate` rows to one); "mean" and "max" pool element-wise. Compressed rows are projected by `key`
    and `value` like all rows. With `reconstruction`, a training pass over more than one segment stores a loss for
    `take_auxiliary_loss`.
    """

    def __init__(
        self,
        heads: Heads,
        *,
        hidden_size: int,
        bias: bool,
        past: MemorySizes,
        pooling: str = "mean",
        reconstruction: float = 0.0,
    ) -> None:
        super().__init__()
        self.pooling, self.reconstruction = pooling, reconstruction
        inner = heads.query * heads.key_size
        self.heads, self.size, self.past = heads.query, heads.key_size, past
        self.query = nn.Linear(hidden_size, inner, bias=bias)
        self.key = nn.Linear(hidden_size, inner, bias=bias)
        self.value = nn.Linear(hidden_size, inner, bias=bias)
        self.output = nn.Linear(inner, hidden_size, bias=bias)
        self.mix = nn.Linear(past.rate * hidden_size, hidden_size, bias=False) if pooling == "convolution" else None
        for linear in filter(None, (self.query, self.key, self.value, self.output, self.mix)):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences [batch, token, hidden_size] -> [batch, token, hidden_size].

        `key_padding_mask` [batch, token], bool, True where a token is real.
        """
        refuse_source(source)
        real = query.new_ones(query.shape[:2]) if key_padding_mask is None else key_padding_mask.to(query.dtype)
        queries, key, value = (self._split(linear, query) for linear in (self.query, self.key, self.value))
        if query.shape[1] > self.past.segment:
            if self.training and self.reconstruction:
                self.keep_auxiliary_loss(self.reconstruction * self.reconstruction_loss(query, real))
            return self._out(self._by_segments(query, real, (queries, key, value)), query)
        places = torch.arange(query.shape[1], device=query.device)
        allowed = self.past.near(places[:, None], places) & (real[:, None] > 0)
        return self._out(attend(queries, key, value, allowed), query)

    def reconstruction_loss(self, rows: Tensor, real: Tensor) -> Tensor:
        """The attention-reconstruction loss: how compression changes what segments read from tokens leaving the memory.

        The mean squared difference over real tokens and elements (Rae et al. 2020, algorithm 2), a scalar, with a
        gradient to `mix` only. `rows` [batch, token, hidden_size]; `real` [batch, token] is one for real tokens, else
        zero.
        """
        past, held = self.past, rows.detach()
        step, behind, missing = past.segment // past.rate, past.memory // past.rate, -rows.shape[1] % past.segment
        count = (rows.shape[1] + missing) // past.segment
        small, has = self._compress(held, real)
        absent = count * step - small.shape[1]
        old = [slide(part, past.segment, past.segment, (past.memory, missing))[:, :count] for part in (held, real)]
        new = [slide(part, step, step, (behind, absent))[:, :count] for part in (small, has)]
        segments, there = (slide(part, past.segment, past.segment, (0, missing)) for part in (held, real))
        query = self._frozen(self.query, segments).flatten(0, 1)
        read = []
        for seen, known in (old, new):
            key, value = (self._frozen(linear, seen).flatten(0, 1) for linear in (self.key, self.value))
            read.append(attend(query, key, value, known.flatten(0, 1)[:, None] > 0))
        counts = (there * (old[1].amax(-1, keepdim=True) > 0)).flatten(0, 1)[..., None, None]
        change = ((read[0] - read[1]).square() * counts).sum()
        return change / (counts.sum() * self.heads * self.size).clamp(min=1)

    def _frozen(self, linear: nn.Linear, rows: Tensor) -> Tensor:
        """Like `_split`, without a gradient to the projection."""
        frozen = {name: weight.detach() for name, weight in linear.named_parameters()}
        out: Tensor = functional.linear(rows, frozen["weight"], frozen.get("bias"))
        return out.reshape(*rows.shape[:-1], self.heads, self.size)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests, one request at a time.

        Returns [tokens, hidden_size]. Extends the state "kv" and replaces the state "compressed": ring buffers of the
        "key" and "value" of compressed rows [requests, ring, heads, size], and "pending" [requests, before + rate,
        hidden_size], the input rows of the next compressed row so far.
        """
        queries, key, value = (self._split(linear, query) for linear in (self.query, self.key, self.value))
        state["kv"].append({"key": key, "value": value})
        held, out, after = state["compressed"].read(), [], []
        for span in batch.spans():
            piece, mine = slice(span.start, span.stop), {name: rows[span.request] for name, rows in held.items()}
            context = batch.contexts[span.request]
            far, numbers, kept = self._extended(mine, query[piece], context)
            near, places = state["kv"].rows([span.request]), batch.positions[piece, None]
            seen = self.past.near(places, near.positions)
            seen = seen if near.key_padding_mask is None else seen & near.key_padding_mask
            allowed = torch.cat([self.past.far(places, numbers), seen], dim=-1)
            keys, values = (torch.cat([far[name], near.fields[name][0]])[None] for name in ("key", "value"))
            out.append(attend(queries[None, piece], keys, values, allowed[None])[0])
            after.append(kept)
        state["compressed"].write({name: torch.stack([kept[name] for kept in after]) for name in held})
        return self._out(torch.cat(out), query)

    def _by_segments(self, rows: Tensor, real: Tensor, projected: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Outputs [batch, token, heads, size]: each segment attends to itself, its memory and its compressed rows."""
        past, length = self.past, rows.shape[1]
        missing, step, behind = -length % past.segment, past.segment // past.rate, past.memory // past.rate
        count = (length + missing) // past.segment
        small, has = self._compress(rows, real)
        absent = (length + missing) // past.rate - small.shape[1]

        def near(tokens: Tensor) -> Tensor:
            return slide(tokens, past.window, past.segment, (past.memory, missing))

        def far(summaries: Tensor) -> Tensor:
            return slide(summaries, past.compressed, step, (past.compressed + behind, absent))[:, :count]

        start = torch.arange(count, device=rows.device)[:, None, None] * past.segment
        query = start + torch.arange(past.segment, device=rows.device)[:, None]
        token = start - past.memory + torch.arange(past.window, device=rows.device)
        number = start // past.rate - behind - past.compressed + torch.arange(past.compressed, device=rows.device)
        # Windows extend before the first token and past the last one; these places are masked as padding.
        seen = past.near(query, token) & (near(real)[:, :, None] > 0)
        allowed = torch.cat([past.far(query, number) & (far(has)[:, :, None] > 0), seen], dim=-1)
        keys = torch.cat([far(self._split(self.key, small)), near(projected[1])], dim=2)
        values = torch.cat([far(self._split(self.value, small)), near(projected[2])], dim=2)
        queries = slide(projected[0], past.segment, past.segment, (0, missing))
        out = attend(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), allowed.flatten(0, 1))
        return out.reshape(rows.shape[0], count * past.segment, self.heads, self.size)[:, :length]

    def _compress(self, rows: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Compress rows [batch, token, hidden_size] to [batch, row, hidden_size].

        Also returns the number of real tokens of each compressed row [batch, row]. `real` [batch, token] is one for
        real tokens, else zero.
        """
        known = self._blocks(pad(real, (self.past.before, 0)))
        blocks = self._blocks(pad(rows * real[..., None], (0, 0, self.past.before, 0)))
        return self._pooled(blocks, known), known.sum(-1)

    def _blocks(self, rows: Tensor) -> Tensor:
        """The tokens of each compressed row, [batch, row, rate, ...], from tokens [batch, token, ...] that start with
        `before` tokens of context."""
        past, missing = self.past, -(rows.shape[1] - self.past.before) % self.past.rate
        return slide(rows, past.before + past.rate, past.rate, (0, missing))[:, :, :: past.dilation]

    def _pooled(self, blocks: Tensor, real: Tensor) -> Tensor:
        """Pool blocks [batch, row, rate, hidden_size] to rows [batch, row, hidden_size].

        `real` [batch, row, rate] is one for real tokens; other tokens must be zeros.
        """
        if self.pooling == "max":
            largest = blocks.masked_fill(real[..., None] == 0, -torch.inf).amax(2)
            return torch.where(real.sum(-1, keepdim=True) > 0, largest, 0)
        if self.mix is None:
            return blocks.sum(2) / real.sum(-1, keepdim=True).clamp(min=1)
        mixed: Tensor = self.mix(blocks.flatten(2))
        return mixed

    def _extended(self, held: Fields, rows: Tensor, context: int) -> tuple[Fields, Tensor, Fields]:
        """Extend the compressed memory of a request by new rows [tokens, hidden_size] after `context` tokens.

        Returns the compressed keys and values, their indices (negative for empty places) and the new state."""
        past = self.past
        done, waiting = divmod(context, past.rate)
        pending = torch.cat([held["pending"][: past.before + waiting].to(rows.dtype), rows])
        made = (pending.shape[0] - past.before) // past.rate
        rest = pending[made * past.rate :]
        blocks = self._blocks(pending[None])[:, :made]
        small = self._pooled(blocks, blocks.new_ones(blocks.shape[:3]))
        places = torch.arange(past.ring, device=rows.device)
        # The index of the newest row at each place of the ring buffer; negative for places not yet filled.
        numbers = done - 1 - (done - 1 - places) % past.ring
        fresh = torch.arange(done, done + made, device=rows.device)
        new = {"key": self._split(self.key, small)[0], "value": self._split(self.value, small)[0]}
        far = {name: torch.cat([held[name].to(rows.dtype), new[name]]) for name in new}
        last = fresh[-past.ring :]
        kept = {
            name: held[name].index_copy(0, last % past.ring, new[name][-past.ring :].to(held[name].dtype))
            for name in new
        }
        kept["pending"] = pad(rest, (0, 0, 0, held["pending"].shape[0] - rest.shape[0])).to(held["pending"].dtype)
        return far, torch.cat([numbers, fresh]), kept

    def _split(self, linear: nn.Linear, rows: Tensor) -> Tensor:
        """Project rows [..., hidden_size] and split them into heads, [..., heads, size]."""
        out: Tensor = linear(rows).reshape(*rows.shape[:-1], self.heads, self.size)
        return out

    def _out(self, rows: Tensor, inputs: Tensor) -> Tensor:
        out: Tensor = self.output(rows.flatten(-2).to(inputs.dtype))
        return out


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Outputs [batch, query, heads, size] of softmax attention; `allowed` [batch or 1, query, key]."""
    return read(attention_weights(query, key, allowed), value)


def attention_weights(query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
    """Softmax weights [batch, heads, query, key] of queries and keys [batch, row, heads, size].

    `allowed` [batch or 1, query, key], bool, True where a query may see a key.
    """
    scores = (wide(query) * query.shape[-1] ** -0.5).transpose(1, 2) @ wide(key).permute(0, 2, 3, 1)
    return shares(scores, allowed[..., None, :, :])


def read(weights: Tensor, value: Tensor) -> Tensor:
    """Outputs [batch, query, heads, size] of weights [batch, heads, query, key]."""
    return (weights @ wide(value).transpose(1, 2)).transpose(1, 2)


def slide(rows: Tensor, size: int, step: int, around: tuple[int, int]) -> Tensor:
    """Windows [batch, window, size, ...], one every `step` rows, of rows [batch, row, ...] padded by `around` zeros."""
    filled = pad(rows, (0, 0) * (rows.dim() - 2) + around)
    return filled.unfold(1, size, step).movedim(-1, 2)
