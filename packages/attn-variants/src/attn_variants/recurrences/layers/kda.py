"""The layer of Kimi Delta Attention."""

from __future__ import annotations

import math

import torch
from attn_core import Heads
from attn_core.kernels.recurrence import Steps
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import softplus

from attn_variants.recurrences.layer import Inputs
from attn_variants.recurrences.layers.deltanet import EPSILON, DeltaLayer
from attn_variants.recurrences.numbers import by_heads, fresh_linear, rms_normed

RATES = (1.0, 16.0)
STEPS = (1e-3, 1e-1)
"""Ranges that the decay is drawn from, as in the authors' code: a head's rate evenly, a channel's step log-evenly."""


class KimiDeltaLayer(DeltaLayer):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, §3).

    Learned beside DeltaNet's: `fade` and `gate` (two `nn.Linear` each), `rate` [heads], natural logarithms, and
    `step_bias` [heads, key_size].
    """

    def __init__(self, heads: Heads, *, width: int, bias: bool, chunk: int, taps: int) -> None:
        super().__init__(heads, width=width, bias=bias, chunk=chunk, taps=taps)
        into, out, rank = heads.query * heads.key_size, heads.query * heads.value_size, heads.value_size
        self.fade = nn.Sequential(fresh_linear(width, rank, bias=False), fresh_linear(rank, into, bias=False))
        self.gate = nn.Sequential(fresh_linear(width, rank, bias=False), fresh_linear(rank, out, bias=False))
        self.rate = nn.Parameter(torch.empty(heads.query).uniform_(*RATES).log())
        low, high = (math.log(size) for size in STEPS)
        size = torch.empty(heads.query, heads.key_size).uniform_(low, high).exp()
        # The inverse of softplus, so that a bias alone gives the step that was drawn.
        self.step_bias = nn.Parameter(size + torch.log(-torch.expm1(-size)))

    def steps(self, inputs: Inputs) -> Steps:
        """DeltaNet's, and the log decay of every channel."""
        size = softplus(by_heads(wide(self.fade(inputs.rows)), self.heads.query) + wide(self.step_bias))
        return super().steps(inputs)._replace(decay=-wide(self.rate).exp()[:, None] * size)

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Each head normed, gated and projected."""
        gate = by_heads(torch.sigmoid(wide(self.gate(rows))), self.heads.query)
        return super(DeltaLayer, self).finish(rms_normed(out, self.norm, EPSILON) * gate, rows)
