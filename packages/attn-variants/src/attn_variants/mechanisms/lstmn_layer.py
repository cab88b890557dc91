"""The layer of long short-term memory-networks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core import Heads, LayerState, RaggedBatch
from attn_core.batch import Rows
from attn_core.masking import shares, wide
from torch import Tensor, nn

from attn_variants.attention.projections import glorot_parameter, refuse_source

TAPES = ("hidden", "memory", "key")
"""The fields that are written for each token."""


class Tape(NamedTuple):
    """The tapes so far: `hidden` (hidden states), `memory` (cell states) and `key` (W_h `hidden`), each [batch,
    written, heads, size], and `allowed` [batch, written], True for real tokens."""

    hidden: Tensor
    memory: Tensor
    key: Tensor
    allowed: Tensor


class LstmnOutput(NamedTuple):
    """The results of some tokens: `hidden`, `memory` and `key` [batch, token, heads, size], the last `summary` of
    hidden states [batch, heads, size], and each token's weights [batch, heads, written before it]."""

    hidden: Tensor
    memory: Tensor
    key: Tensor
    summary: Tensor
    weights: list[Tensor]


class LstmnLayer(nn.Module):
    """LSTM cells whose previous state is read by attention from the tapes of all earlier hidden and cell states.

    Learned, per head: `gates` (`nn.Linear` to input, forget, candidate and output), `recurrent` [heads, size, 4 size];
    for attention `attend_input` (`nn.Linear`), `attend_hidden` and `attend_summary` [heads, size, size], `vector`
    [heads, size]; and `output` (`nn.Linear`). Everything between inputs and output is at least float32.
    """

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool) -> None:
        super().__init__()
        count, size = heads.query, heads.key_size
        self.heads, self.size = count, size
        self.gates = nn.Linear(hidden_size, count * 4 * size)
        self.attend_input = nn.Linear(hidden_size, count * size, bias=False)
        self.recurrent = glorot_parameter(count, size, 4 * size)
        self.attend_hidden = glorot_parameter(count, size, size)
        self.attend_summary = glorot_parameter(count, size, size)
        self.vector = glorot_parameter(count, size)
        self.output = nn.Linear(count * size, hidden_size, bias=bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Run over whole sequences [batch, token, hidden_size], and project the hidden states to the same shape.

        A padded token, False in `key_padding_mask` [batch, token], is not attended to and gives zeros.
        """
        refuse_source(source)
        if query.shape[1] == 0:
            return query.clone()
        written = self._run(query, self._empty(query), self._zeros(query), key_padding_mask)
        return self._out(written.hidden, query, key_padding_mask)

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, token, token]; zero for the token itself and later ones."""
        refuse_source(source)
        length = query.shape[1]
        written = self._run(query, self._empty(query), self._zeros(query), key_padding_mask)
        rows = [nn.functional.pad(row, (0, length - row.shape[-1])) for row in written.weights]
        weights = torch.stack(rows, dim=2)
        return weights if key_padding_mask is None else weights * key_padding_mask[:, None, :, None]

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests; returns the same shape.

        Reads and extends the state "tapes" ("hidden", "memory" and "key", [rows, heads, size]) and replaces the state
        "summary" ("hidden" [requests, heads, size]).
        """
        summaries = state["summary"].read()["hidden"].to(wide(query).dtype)
        if batch.decoding:
            tape = self._tape(batch, list(range(batch.requests)), state, query)
            written = [self._run(query[:, None], tape, summaries, None)]
        else:
            written = [
                self._run(
                    query[None, span.start : span.stop],
                    self._tape(batch, [span.request], state, query),
                    summaries[span.request, None],
                    None,
                )
                for span in batch.spans()
            ]
        hidden = torch.cat([part.hidden.flatten(0, 1) for part in written])
        tapes = {name: torch.cat([getattr(part, name).flatten(0, 1) for part in written]) for name in TAPES}
        state["tapes"].append({name: rows.to(query.dtype) for name, rows in tapes.items()})
        state["summary"].write({"hidden": torch.cat([part.summary for part in written]).to(query.dtype)})
        return self._out(hidden, query, None)

    def _tape(self, batch: RaggedBatch, requests: list[int], state: LayerState, like: Tensor) -> Tape:
        """The tapes that these requests of the batch wrote in earlier steps."""
        contexts = [batch.contexts[request] for request in requests]
        if not any(contexts):
            return self._empty(like[:1].expand(len(requests), -1))
        held: Rows = state["tapes"].rows(requests)
        allowed = held.positions < torch.tensor(contexts, device=like.device)[:, None]
        allowed = allowed if held.key_padding_mask is None else allowed & held.key_padding_mask
        # Rows that are not allowed may hold anything, including NaN.
        hidden, memory, key = (wide(held.fields[name]).masked_fill(~allowed[..., None, None], 0.0) for name in TAPES)
        return Tape(hidden, memory, key, allowed)

    def _run(self, rows: Tensor, tape: Tape, summary: Tensor, key_padding_mask: Tensor | None) -> LstmnOutput:
        """Run over tokens [batch, token, hidden_size], one after the other, continuing a tape."""
        batch, length, _ = rows.shape
        gates = wide(self.gates(rows)).view(batch, length, self.heads, 4 * self.size)
        queries = wide(self.attend_input(rows)).view(batch, length, self.heads, self.size)
        hidden, memory = list(tape.hidden.unbind(1)), list(tape.memory.unbind(1))
        keys = list(tape.key.unbind(1))
        allowed = list(tape.allowed.unbind(1))
        before, weights = len(hidden), []
        for token in range(length):
            read, token_weights = (
                summary.new_zeros(batch, self.heads, 2 * self.size),
                summary.new_zeros(batch, self.heads, 0),
            )
            if hidden:
                query = queries[:, token] + self._of_heads(summary, self.attend_summary)
                token_weights = self._attention_weights(query, torch.stack(keys, 2), torch.stack(allowed, 1))
                pairs = torch.cat([torch.stack(hidden, 2), torch.stack(memory, 2)], dim=-1)
                read = (token_weights[:, :, None] @ pairs)[:, :, 0]
            found, held = read.chunk(2, dim=-1)
            new_hidden, new_memory = cell(gates[:, token] + self._of_heads(found, self.recurrent), held)
            real = rows.new_ones(batch, dtype=torch.bool) if key_padding_mask is None else key_padding_mask[:, token]
            summary = torch.where(real[:, None, None], found, summary)
            hidden.append(new_hidden)
            memory.append(new_memory)
            keys.append(self._of_heads(new_hidden, self.attend_hidden))
            allowed.append(real)
            weights.append(token_weights)
        new = [torch.stack(rows[before:], 1) for rows in (hidden, memory, keys)]
        return LstmnOutput(new[0], new[1], new[2], summary, weights)

    def _attention_weights(self, query: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
        """Weights [batch, heads, written] of a query [batch, heads, size] over keys [batch, heads, written, size]."""
        scores = torch.tanh(keys + query[:, :, None]) @ self.vector.to(query.dtype)[:, :, None]
        return shares(scores[..., 0], allowed[:, None])

    def _of_heads(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows [batch, heads, into] by a matrix per head [heads, into, out]: returns [batch, heads, out]."""
        return (rows.transpose(0, 1) @ weight.to(rows.dtype)).transpose(0, 1)

    def _empty(self, like: Tensor) -> Tape:
        nothing = wide(like).new_zeros(like.shape[0], 0, self.heads, self.size)
        return Tape(nothing, nothing, nothing, nothing.new_zeros(like.shape[0], 0, dtype=torch.bool))

    def _zeros(self, like: Tensor) -> Tensor:
        return wide(like).new_zeros(like.shape[0], self.heads, self.size)

    def _out(self, hidden: Tensor, inputs: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        rows = hidden.flatten(-2).to(inputs.dtype)
        out: Tensor = self.output(rows if key_padding_mask is None else rows * key_padding_mask[..., None])
        return out


def cell(gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """An LSTM cell: the hidden state and cell state [..., size] from gates [..., 4 size] and the previous cell state.

    Gates are in the order of `torch.nn.LSTMCell`: input, forget, candidate, output."""
    enter, forget, candidate, leave = gates.chunk(4, dim=-1)
    memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(candidate)
    return torch.sigmoid(leave) * torch.tanh(memory), memory
