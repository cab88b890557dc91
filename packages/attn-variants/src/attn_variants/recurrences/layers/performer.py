"""The layers of Performer attention."""

from __future__ import annotations

import torch
from attn_core import Heads, LayerState, RaggedBatch
from attn_core.errors import WrongState
from attn_core.kernels.recurrence import Steps
from attn_core.masking import wide
from torch import Generator, Tensor
from torch.nn.functional import relu

from attn_variants.compute.linear import with_ones
from attn_variants.linear_layer import LinearAttentionLayer
from attn_variants.recurrences import favor
from attn_variants.recurrences.layer import Inputs
from attn_variants.recurrences.projection import orthogonal


class RandomFeatureLayer(LinearAttentionLayer):
    """Linear attention whose features are of random directions, `projection` [features, key_size].

    The projection is a buffer: it is saved with the layer, and only `redraw` changes it.
    """

    projection: Tensor

    def __init__(
        self, heads: Heads, *, width: int, causal: bool, bias: bool, chunk: int, features: int, epsilon: float
    ) -> None:
        super().__init__(heads, width=width, causal=causal, bias=bias, chunk=chunk)
        self.epsilon = epsilon
        self.register_buffer("projection", orthogonal(features, heads.key_size))

    def redraw(self, generator: Generator | None = None) -> None:
        """Draw new orthogonal directions, as the paper does every so many training steps.

        Raises `WrongState` in evaluation mode, where outputs must stay what they are.
        """
        if not self.training:
            raise WrongState("performer: the directions are frozen in evaluation; call train() before redraw()")
        features, size = self.projection.shape
        fresh = orthogonal(features, size, generator)
        self.projection.copy_(fresh)

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Sums of values by sums of ones, projected."""
        projected: Tensor = self.output(favor.quotient(out).flatten(-2).to(rows.dtype))
        return projected


class ReluFeatureLayer(RandomFeatureLayer):
    """Features max(ω·x, 0) + ε (Choromanski et al. 2021, §4.2: the generalised kernel)."""

    def steps(self, inputs: Inputs) -> Steps:
        """Features of queries and keys, and values with a column of ones."""
        directions = wide(self.projection).transpose(0, 1)
        query, key = (relu(wide(rows) @ directions) + self.epsilon for rows in (inputs.query, inputs.key))
        return Steps(query, key, with_ones(inputs.value, key))

    def weights(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """The shares [batch, heads, query, key] of the values in what each head reads, zero for padded keys."""
        steps, _ = self.read(query, source, keep)
        return favor.shares(favor.pairs(steps.query, steps.key, causal=self.causal))


class SoftmaxFeatureLayer(RandomFeatureLayer):
    """Features e^(ω·x - |x|²/2): softmax attention in expectation."""

    def steps(self, inputs: Inputs) -> Steps:
        """Features of queries, logarithms of those of keys, and values with a column of ones."""
        projection = wide(self.projection)
        query, key = (favor.log_features(wide(rows), projection) for rows in (inputs.query, inputs.key))
        return Steps(favor.query_features(query, self.epsilon), key, with_ones(inputs.value, key))

    def forward(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """Attend over whole sequences [batch, tokens, width] -> [batch, tokens, width].

        `keep` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` where a source is given.
        """
        parts = self._masked(query, source, keep)
        if not self.causal:
            sums = favor.full_sums(*parts, self.epsilon)
        elif query.shape[1]:
            sums, _ = self._sums(parts, None, self.chunk)
        else:
            sums = parts[2]
        return self.finish(sums, query)

    def weights(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """The shares [batch, heads, query, key] of the values in what each head reads, zero for padded keys."""
        parts = self._masked(query, source, keep)
        return favor.shares(favor.pair_sums(*parts, causal=self.causal, epsilon=self.epsilon))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, width] of many requests; returns [tokens, width].

        Reads and replaces the state "memory": "S" [requests, heads, features, value_size + 1], "seen" [requests, heads,
        value_size + 1] and "top" [requests, heads], all float32; see `favor.Memory`.
        """
        held = state["memory"].read()
        steps, _ = self._steps(query[None], batch.positions[None], None, None)
        before = favor.Memory(*(held[name].to(steps.value.dtype) for name in ("S", "seen", "top")))
        if batch.decoding:
            query_rows, key, value = (part.transpose(0, 1) for part in steps[:3])
            sums, after = self._sums((query_rows, key, value), before, 1)
            sums = sums.transpose(0, 1)
        else:
            pieces, memories = [], []
            for span in batch.spans():
                query_rows, key, value = (part[:, span.start : span.stop] for part in steps[:3])
                known = favor.Memory(*(part[span.request, None] for part in before))
                seen, memory = self._sums((query_rows, key, value), known, self.chunk)
                pieces.append(seen)
                memories.append(memory)
            sums = torch.cat(pieces, dim=1)
            after = favor.Memory(*(torch.cat(parts) for parts in zip(*memories, strict=True)))
        kept = zip(("S", "seen", "top"), after, strict=True)
        state["memory"].write({name: part.to(held[name].dtype) for name, part in kept})
        return self.finish(sums, query[None])[0]

    def _sums(
        self, parts: tuple[Tensor, Tensor, Tensor], before: favor.Memory | None, chunk: int
    ) -> tuple[Tensor, favor.Memory]:
        """Sums over earlier keys; see `favor.causal_sums`."""
        return favor.causal_sums(parts, before, plan=self.plan, chunk=chunk, epsilon=self.epsilon)

    def _masked(self, rows: Tensor, source: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries, log features of keys, -inf where padded, and values, zero there."""
        steps, _ = self.read(rows, source, None)
        if keep is None:
            return steps.query, steps.key, steps.value
        real = keep[..., None, None]
        return steps.query, torch.where(real, steps.key, -torch.inf), torch.where(real, steps.value, 0)
