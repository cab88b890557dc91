"""The layer of linear attention, whose memory is one matrix a head."""

from __future__ import annotations

import torch
from attn_core import Heads, LayerState, RaggedBatch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_variants.compute.linear import bidirectional, chunked, features, recurrent, with_ones


class LinearAttentionLayer(nn.Module):
    """Linear attention over inputs of `width`; `chunk` tokens meet pair by pair.

    Learned: `query`, `key`, `value`, `output` (`nn.Linear`, uniform by Glorot's rule, biases zero). Features and
    sums are at least float32, whatever the inputs are.
    """

    def __init__(self, heads: Heads, *, width: int, causal: bool, bias: bool, chunk: int) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.chunk = chunk
        self.query = nn.Linear(width, heads.query * heads.key_size, bias=bias)
        self.key = nn.Linear(width, heads.query * heads.key_size, bias=bias)
        self.value = nn.Linear(width, heads.query * heads.value_size, bias=bias)
        self.output = nn.Linear(heads.query * heads.value_size, width, bias=bias)
        for linear in (self.query, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """Attend over whole sequences [batch, tokens, width] -> [batch, tokens, width].

        `keep` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` where a source is given.
        """
        if source is not None:
            raise InvalidValue.of("source", tuple(source.shape), "None: linear attention is over one sequence")
        rows, key, value = self._project(query)
        if keep is not None:
            key = key * keep[:, :, None, None]
        if self.causal:
            out, _ = chunked(rows, key, value, None, self.chunk)
        else:
            out = bidirectional(rows, key, value)
        return self._out(out, query)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, width] of many requests; returns [tokens, width].

        Reads and replaces the state "sums": "S" [requests, heads, key_size, value_size] and "z" [requests, heads,
        key_size], both float32.
        """
        rows, key, value = self._project(query)
        remembered = state["sums"].read()
        sums = torch.cat([remembered["S"], remembered["z"][..., None]], dim=-1).to(key.dtype)
        if batch.decoding:
            out, sums = recurrent(rows[:, None], key[:, None], value[:, None], sums)
            out = out[:, 0]
        else:
            pieces, after = [], []
            for span in batch.spans():
                piece = slice(span.start, span.stop)
                mine = rows[None, piece], key[None, piece], value[None, piece]
                seen, sums_then = chunked(*mine, sums[span.request, None], self.chunk)
                pieces.append(seen[0])
                after.append(sums_then)
            out, sums = torch.cat(pieces), torch.cat(after)
        kept = sums.to(remembered["S"].dtype)
        state["sums"].write({"S": kept[..., :-1], "z": kept[..., -1]})
        return self._out(out, query)

    def _project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries and keys, and values with a column of ones, [..., tokens, heads, size]."""
        shape = *rows.shape[:-1], self.heads.query, -1
        key = features(self.key(rows).reshape(shape))
        return features(self.query(rows).reshape(shape)), key, with_ones(self.value(rows).reshape(shape), key)

    def _out(self, out: Tensor, inputs: Tensor) -> Tensor:
        projected: Tensor = self.output(out.flatten(-2).to(inputs.dtype))
        return projected
