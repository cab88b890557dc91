"""The layer of coverage (See et al. 2017, arXiv 1704.04368)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from attn_core import Fields, Heads, LayerState, RaggedBatch
from attn_core.errors import InvalidValue
from attn_core.masking import shares, wide
from torch import Tensor, nn

from attn_variants.attention.projections import by_heads, fresh_linear, glorot_parameter


class Memory(NamedTuple):
    """The source that queries attend to: `key` and `value` [batch, heads, key, size], `allowed` [batch, 1, key]."""

    key: Tensor
    value: Tensor
    allowed: Tensor


class Attended(NamedTuple):
    """Outputs and weights [batch, heads, query, ...] of queries, and the coverage [batch, heads, key] after them."""

    outputs: Tensor
    weights: Tensor
    coverage: Tensor


class CoverageLayer(nn.Module):
    """Additive attention whose scores include the sum of earlier weights.

    Learned: `query`, `key`, `value`, `output` (`nn.Linear`; `key` has no bias, as that of `query` is added to the same
    sum); `vector` and `of_coverage` [heads, size], v and w_c of every head. Within a call, sums are at least float32.
    """

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, longest: int) -> None:
        super().__init__()
        count, size = heads.query, heads.key_size
        self.heads, self.longest = count, longest
        self.query = fresh_linear(hidden_size, count * size, bias=bias)
        self.key = fresh_linear(hidden_size, count * size, bias=False)
        self.value = fresh_linear(hidden_size, count * size, bias=bias)
        self.output = fresh_linear(count * size, hidden_size, bias=bias)
        self.vector = glorot_parameter(count, size)
        self.of_coverage = glorot_parameter(count, size)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend, query by query, from sequences [batch, query, hidden_size] to sources [batch, key, hidden_size]."""
        return self._out(self._whole(query, source, key_padding_mask).outputs, query)

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        return self._whole(query, source, key_padding_mask).weights

    def encode(self, source: Tensor) -> Mapping[str, Fields]:
        """The state "source" of one source [source, hidden_size]: "key" and "value" [source, heads, size]."""
        return {"source": self._keys_and_values(source)}

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests; returns the same shape.

        Reads the state "source" and replaces the state "coverage" ("sum" [requests, heads, longest]).
        """
        held = state["coverage"].read()["sum"]
        if batch.decoding:
            parts = [self._stepped(query[:, None], held, state, list(range(batch.requests)))]
        else:
            parts = [
                self._stepped(query[None, span.start : span.stop], held[span.request, None], state, [span.request])
                for span in batch.spans()
            ]
        sums = torch.cat([nn.functional.pad(p.coverage, (0, self.longest - p.coverage.shape[-1])) for p in parts])
        state["coverage"].write({"sum": sums.to(held.dtype)})
        # Each part is [batch, heads, query, size]: in decoding all requests with one query each, else one request.
        rows = torch.cat([part.outputs.transpose(1, 2).flatten(0, 1) for part in parts])
        return self._out(rows[None].transpose(1, 2), query[None])[0]

    def _stepped(self, rows: Tensor, held: Tensor, state: LayerState, requests: list[int]) -> Attended:
        """Attend from rows [requests, query, hidden_size], starting at a coverage `held` [requests, heads, longest]."""
        seen = state["source"].rows(requests)
        real = seen.key_padding_mask
        if real is None:
            real = torch.ones(seen.positions.shape, dtype=torch.bool, device=rows.device)
        memory = Memory(seen.fields["key"].transpose(1, 2), seen.fields["value"].transpose(1, 2), real[:, None])
        return self._attend(rows, memory, wide(held)[..., : real.shape[1]])

    def _whole(self, query: Tensor, source: Tensor | None, key_padding_mask: Tensor | None) -> Attended:
        if source is None:
            raise InvalidValue.of("source", None, "a tensor [batch, key, hidden_size]")
        fields = self._keys_and_values(source)
        key, value = fields["key"], fields["value"]
        allowed = key.new_ones(key.shape[:2], dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        nothing = wide(key).new_zeros(key.shape[0], self.heads, key.shape[1])
        return self._attend(query, Memory(key.transpose(1, 2), value.transpose(1, 2), allowed[:, None]), nothing)

    def _attend(self, rows: Tensor, memory: Memory, coverage: Tensor) -> Attended:
        """Attend from rows [batch, query, hidden_size] in order, starting at a coverage [batch, heads, key]."""
        queries = wide(by_heads(self.query(rows), self.heads)).transpose(1, 2)
        key, value = wide(memory.key), wide(memory.value)
        vector, coverage_vector = self.vector.to(key.dtype)[:, :, None], self.of_coverage.to(key.dtype)[:, None]
        outputs, weights = [queries[:, :, :0]], [queries.new_zeros(*queries.shape[:2], 0, key.shape[2])]
        for query in range(rows.shape[1]):
            inner = torch.tanh(queries[:, :, query, None] + key + coverage[..., None] * coverage_vector)
            query_weights = shares((inner @ vector)[..., 0], memory.allowed)
            outputs.append(query_weights[:, :, None] @ value)
            weights.append(query_weights[:, :, None])
            coverage = coverage + query_weights
        return Attended(torch.cat(outputs, 2), torch.cat(weights, 2), coverage)

    def _out(self, outputs: Tensor, like: Tensor) -> Tensor:
        """Project outputs [batch, heads, query, size] to rows [batch, query, hidden_size]."""
        rows: Tensor = self.output(outputs.transpose(1, 2).flatten(2).to(like.dtype))
        return rows

    def _keys_and_values(self, source: Tensor) -> dict[str, Tensor]:
        """The "key" and "value" [..., key, heads, size] of sources [..., key, hidden_size].

        Raises `InvalidValue` for sources longer than `longest`.
        """
        if source.shape[-2] > self.longest:
            raise InvalidValue.of("source", f"{source.shape[-2]} tokens", f"at most max_seq_len {self.longest}")
        return {"key": by_heads(self.key(source), self.heads), "value": by_heads(self.value(source), self.heads)}
