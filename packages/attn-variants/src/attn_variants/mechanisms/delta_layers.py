"""Layers of the delta rule: DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import torch
from attn_core import Heads, RaggedBatch
from attn_core.batch import SlotsInPlace
from attn_core.kernels.recurrence import Steps
from attn_core.kernels.recurrent_step import DecayInputs, OutputInputs, RecurrentStepInputs
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from attn_variants.attention.projections import by_heads, fresh_linear
from attn_variants.compute.norm import rms_normed, unit
from attn_variants.mechanisms.decode_steps import delta_step, kimi_delta_step
from attn_variants.mechanisms.recurrence_layers import Inputs, Projections, RecurrenceLayer


class DeltaLayer(RecurrenceLayer):
    """DeltaNet (Yang et al. 2024, arXiv 2406.06484, §3.4).

    Learned besides the projections: `convolution`, `strength` (`nn.Linear` to one number per head) and `norm`
    [value_size].
    """

    further: tuple[str, ...] = ("strength",)

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, chunk: int, taps: int, eps: float) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk, taps=taps)
        self.eps = eps
        self.strength = fresh_linear(hidden_size, heads.query, bias=False)
        self.norm = nn.Parameter(torch.ones(heads.value_size))
        self.step_spec = delta_step(heads, taps)

    def steps(self, inputs: Inputs) -> Steps:
        """Queries and keys of unit length, queries divided by √key_size, values, and the strength β of every write."""
        query, key, value = (wide(rows) for rows in (inputs.query, inputs.key, inputs.value))
        if self.convolution is None:
            # With a convolution, SiLU is already applied there.
            query, key, value = silu(query), silu(key), silu(value)
        strength = torch.sigmoid(wide(inputs.projected["strength"]))
        query, key = unit(query) * self.heads.key_size**-0.5, unit(key)
        group = self.heads.query // self.heads.key_value
        if group > 1:
            query, key = (rows.repeat_interleave(group, dim=2) for rows in (query, key))
        return Steps(query, key, value, strength=strength)

    def finish(self, out: Tensor, projected: Projections) -> Tensor:
        """Normalise each head, and project."""
        return super().finish(rms_normed(out, self.norm, self.eps), projected)

    def step_inputs(self, projected: Projections, batch: RaggedBatch, state: SlotsInPlace) -> RecurrentStepInputs:
        """See `RecurrenceLayer`."""
        return dataclasses.replace(
            super().step_inputs(projected, batch, state),
            scales=(self.heads.key_size**-0.5, 1.0),
            strength=projected["strength"],
            output=OutputInputs(norm=self.norm, eps=self.eps),
        )


RATES = (1.0, 16.0)
STEPS = (1e-3, 1e-1)
"""The ranges of the initial decay, as in the authors' code: rates per head, uniform; steps per channel, log-uniform."""


class KimiGates(NamedTuple):
    """The gates of Kimi Delta Attention: their `rank`, 0 for full matrices; whether the output gate has a `bias`; and
    the lower `bound` of log decays, None for none."""

    rank: int
    bias: bool
    bound: float | None

    def projection(self, hidden_size: int, outputs: int, *, bias: bool) -> nn.Module:
        """The linear layers of a gate."""
        if not self.rank:
            return fresh_linear(hidden_size, outputs, bias=bias)
        return nn.Sequential(
            fresh_linear(hidden_size, self.rank, bias=False), fresh_linear(self.rank, outputs, bias=bias)
        )


class KimiDeltaLayer(DeltaLayer):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, §3).

    Learned besides the parameters of DeltaNet: `fade` and `gate` (two `nn.Linear` each, or one), `rate` [heads],
    natural logarithms, and `step_bias` [heads, key_size].
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("step_bias",)
    """Parameters of vectors, which are stored in two dimensions."""

    def __init__(
        self, heads: Heads, *, hidden_size: int, bias: bool, chunk: int, taps: int, eps: float, gates: KimiGates
    ) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk, taps=taps, eps=eps)
        self.bound = gates.bound
        self.further = ("strength", "fade.0", "gate.0") if gates.rank else ("strength", "fade", "gate")
        self.fade = gates.projection(hidden_size, heads.query * heads.key_size, bias=False)
        self.gate = gates.projection(hidden_size, heads.query * heads.value_size, bias=gates.bias)
        self.rate = nn.Parameter(torch.empty(heads.query).uniform_(*RATES).log())
        low, high = (math.log(size) for size in STEPS)
        size = torch.empty(heads.query, heads.key_size).uniform_(low, high).exp()
        # The inverse of softplus, so that the bias alone gives the step that was drawn.
        self.step_bias = nn.Parameter(size + torch.log(-torch.expm1(-size)))
        self.step_spec = kimi_delta_step(heads, taps) if gates.bound is None else None

    def steps(self, inputs: Inputs) -> Steps:
        """The inputs of DeltaNet, with the log decay of every channel."""
        size = by_heads(wide(inputs.projected.through("fade")), self.heads.query) + wide(self.step_bias)
        rate = wide(self.rate).exp()[:, None]
        decay = -rate * softplus(size) if self.bound is None else self.bound * torch.sigmoid(rate * size)
        return super().steps(inputs)._replace(decay=decay)

    def finish(self, out: Tensor, projected: Projections) -> Tensor:
        """Normalise each head, apply the gate, and project."""
        gate = by_heads(torch.sigmoid(wide(projected.through("gate"))), self.heads.query)
        return super(DeltaLayer, self).finish(rms_normed(out, self.norm, self.eps) * gate, projected)

    def step_inputs(self, projected: Projections, batch: RaggedBatch, state: SlotsInPlace) -> RecurrentStepInputs:
        """See `RecurrenceLayer`."""
        given = super().step_inputs(projected, batch, state)
        fade, gate = projected.through("fade"), projected.through("gate")
        return dataclasses.replace(
            given,
            decay=DecayInputs(by_heads(fade, self.heads.query), self.rate, self.step_bias),
            output=given.output._replace(gate=by_heads(gate, self.heads.query)),
        )
