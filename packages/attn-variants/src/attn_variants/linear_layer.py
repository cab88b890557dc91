"""The layer of linear attention, whose memory is one matrix a head."""

from __future__ import annotations

import torch
from attn_core import Heads
from attn_core.kernels.recurrence import Steps
from torch import Tensor

from attn_variants.compute.linear import EPSILON, bidirectional, divided, features, with_ones
from attn_variants.recurrences.layer import Inputs, RecurrenceLayer


class LinearAttentionLayer(RecurrenceLayer):
    """Linear attention over inputs of `width`; `chunk` tokens meet pair by pair.

    Learned: `query`, `key`, `value`, `output` (`nn.Linear`, uniform by Glorot's rule, biases zero). Features and
    sums are at least float32, whatever the inputs are. The memory's last column is the paper's z.
    """

    def __init__(self, heads: Heads, *, width: int, causal: bool, bias: bool, chunk: int) -> None:
        super().__init__(heads, width=width, bias=bias, chunk=chunk)
        self.causal = causal

    def steps(self, inputs: Inputs) -> Steps:
        """Features of queries and keys, and values with a column of ones."""
        key = features(inputs.key)
        return Steps(features(inputs.query), key, with_ones(inputs.value, key))

    def attend(self, steps: Steps, computed: torch.dtype) -> Tensor:
        """Sums over all earlier tokens, or over all where the order is ignored."""
        return super().attend(steps, computed) if self.causal else bidirectional(*steps[:3])

    def weights(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """The shares [batch, heads, query, key] of the values in what each head reads, zero for padded keys."""
        steps, _ = self.read(query, source, keep)
        pairs = steps.query.transpose(1, 2) @ steps.key.permute(0, 2, 3, 1)
        pairs = pairs.tril() if self.causal else pairs
        return pairs / (pairs.sum(-1, keepdim=True) + EPSILON)

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Sums of values by sums of ones, projected."""
        return super().finish(divided(out), rows)
