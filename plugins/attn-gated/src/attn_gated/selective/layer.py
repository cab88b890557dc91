"""The layer of selective attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core import LayerState, MechanismConfig, RaggedBatch
from attn_core.batch import Rows
from attn_core.errors import InvalidValue
from attn_core.kernels.base import batch_invariant
from attn_core.masking import of_query_heads, shares, wide
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_gated.parallax.correction import turned

PIECE = 1 << 21
"""The largest number of scores that are held at once, except in compiled code."""


class Memory(NamedTuple):
    """Keys and values [batch, heads, key, size] in order of position, `real` [batch, key], False for padding, and
    `masked` [batch, key], the sums F of the positive scores that queries so far have given to keys."""

    key: Tensor
    value: Tensor
    real: Tensor
    masked: Tensor


class SelectiveLayer(nn.Module):
    """Softmax attention whose first head masks tokens for the queries of all heads that follow.

    Learned: `query`, `key`, `value`, `output` (`nn.Linear`, Glorot uniform). `longest` is the number of sums that steps
    keep for a sequence.
    """

    def __init__(self, config: MechanismConfig, longest: int) -> None:
        super().__init__()
        heads, width = config.head_layout, config.hidden_size
        self.heads, self.rotary, self.longest = heads, config.rotary, longest
        self.query = nn.Linear(width, heads.query * heads.key_size, bias=config.bias)
        self.key = nn.Linear(width, heads.key_value * heads.key_size, bias=config.bias)
        self.value = nn.Linear(width, heads.key_value * heads.value_size, bias=config.bias)
        self.output = nn.Linear(heads.query * heads.value_size, width, bias=config.bias)
        for linear in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if config.bias:
                nn.init.zeros_(linear.bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute whole sequences, [batch, tokens, hidden_size] to [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real: padding masks nothing, and it is the first
        real token that is never masked. Raises `InvalidValue` if a source is given.
        """
        return self._out(attended(*self._whole(query, source, key_padding_mask))[0].flatten(-2), query.dtype)

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        return weighed(*self._whole(query, source, key_padding_mask))[0]

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, hidden_size] to [tokens, hidden_size].

        Appends to the state "kv" and replaces "masked" ("sum" [requests, longest]). Raises `InvalidValue` for a request
        of more than `longest` tokens.
        """
        if batch.longest > self.longest:
            raise InvalidValue.of("tokens", batch.longest, f"at most {self.longest}, the max_seq_len of the layer")
        rows, key, value = (part[0] for part in self._projected(query[None], batch.positions[None]))
        state["kv"].append({"key": key, "value": value})
        held = state["masked"].read()["sum"]
        if batch.decoding:
            seen = state["kv"].rows(range(batch.requests))
            out, held = self._stepped(rows[:, None], batch.positions[:, None], seen, held)
        else:
            parts = []
            for span in batch.spans():
                at, seen = slice(span.start, span.stop), state["kv"].rows([span.request])
                parts.append(self._stepped(rows[None, at], batch.positions[None, at], seen, held[span.request, None]))
            out, held = (torch.cat(part) for part in zip(*parts, strict=True))
        state["masked"].write({"sum": held})
        return self._out(out.flatten(-2), query.dtype)

    def _whole(self, query: Tensor, source: Tensor | None, real: Tensor | None) -> tuple[Tensor, Tensor, Memory]:
        """Queries, their places, and what they attend to."""
        if source is not None:
            raise InvalidValue.of("source", tuple(source.shape), "None, as 'selective' is self-attention")
        places = torch.arange(query.shape[1], device=query.device).expand(query.shape[0], -1)
        rows, key, value = self._projected(query, places)
        real = torch.ones_like(places, dtype=torch.bool) if real is None else real
        masked = wide(query).new_zeros(places.shape)
        return self._scaled(rows), places, self._memory(key, value, real, masked)

    def _stepped(self, rows: Tensor, places: Tensor, seen: Rows, held: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [tokens, heads, value_size] of queries [requests, query, heads, size] over cached rows, and the sums
        [requests, longest] after them, which are `held` before."""
        key, value, real = seen.fields["key"], seen.fields["value"], seen.key_padding_mask
        real = torch.ones_like(seen.positions, dtype=torch.bool) if real is None else real
        masked, later = held[:, : key.shape[1]], held[:, key.shape[1] :]
        out, masked = attended(self._scaled(rows), places, self._memory(key, value, real, masked))
        return out.flatten(0, 1), torch.cat([masked.to(held.dtype), later], dim=1)

    def _projected(self, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, token, heads, size] of rows [batch, token, hidden_size]."""
        heads = self.heads
        query = torch.unflatten(self.query(rows), -1, (heads.query, heads.key_size))
        key = torch.unflatten(self.key(rows), -1, (heads.key_value, heads.key_size))
        value = torch.unflatten(self.value(rows), -1, (heads.key_value, heads.value_size))
        if self.rotary is not None:
            query, key = (turned(wide(part), self.rotary, places).to(part.dtype) for part in (query, key))
        return query, key, value

    def _scaled(self, rows: Tensor) -> Tensor:
        scaled: Tensor = wide(rows).transpose(1, 2) * self.heads.key_size**-0.5
        return scaled

    def _memory(self, key: Tensor, value: Tensor, real: Tensor, masked: Tensor) -> Memory:
        key, value = (of_query_heads(self.heads, wide(part).transpose(1, 2)) for part in (key, value))
        return Memory(key, value, real, masked)

    def _out(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        projected: Tensor = self.output(out.to(dtype))
        return projected


def attended(query: Tensor, places: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """Outputs [batch, query, heads, value_size] of scaled queries [batch, heads, query, size] at `places` [batch,
    query], some at a time, and the sums F after the last of them."""

    def read(some: Tensor, at: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        weights, masked = weighed(some, at, memory._replace(masked=masked))
        return weights @ memory.value, masked

    tokens = query.shape[2]
    length = tokens if torch.compiler.is_compiling() else max(1, PIECE // max(1, memory.value[..., 0].numel()))
    length = 1 if batch_invariant() else length  # sums are then rounded after each token, as steps round them
    # Scores are not stored for the backward pass, which recomputes them piece by piece.
    again = tokens > length and torch.is_grad_enabled()
    found, masked = [], memory.masked
    for piece in zip(torch.split(query, length, 2), torch.split(places, length, 1), strict=True):
        out, masked = checkpoint(read, *piece, masked, use_reentrant=False) if again else read(*piece, masked)
        found.append(out)
    return torch.cat(found, dim=2).transpose(1, 2), masked


def weighed(query: Tensor, places: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
    """Weights [batch, heads, query, key] of scaled queries [batch, heads, query, size] at `places` [batch, query], and
    the sums F after the last of them."""
    scores, real = query @ memory.key.transpose(-1, -2), memory.real
    keys, at = torch.arange(real.shape[1], device=real.device), places[..., None]
    may_mask = real.gather(1, places)[..., None] & (keys < at)
    may_be_masked = real & (real.cumsum(1) > 1)
    added = scores[:, 0].relu().masked_fill(~(may_mask & may_be_masked[:, None]), 0.0)
    sums = torch.cat([memory.masked[:, None].to(added.dtype), added], dim=1).cumsum(1)
    seen = real[:, None] & (keys <= at)
    return shares(scores - sums[:, None, :-1], seen[:, None]), sums[:, -1]
