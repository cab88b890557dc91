"""Layers of linear recurrences whose state decays: RetNet, gated linear attention and lightning attention."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import NamedTuple

import torch
from attn_core import Heads, RaggedBatch, Rotary
from attn_core.batch import SlotsInPlace
from attn_core.kernels.recurrence import Steps
from attn_core.kernels.recurrent_step import DecayInputs, OutputInputs, RecurrentStepInputs
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, silu

from attn_variants.attention.projections import by_heads, fresh_linear
from attn_variants.attention.step import batch_cos_sin
from attn_variants.compute.norm import rms_normed
from attn_variants.compute.rotary import cos_sin_to, rotate, rotated_size
from attn_variants.mechanisms.decode_steps import gated_linear_step, lightning_step, retention_step
from attn_variants.mechanisms.recurrence_layers import Inputs, Projections, RecurrenceLayer

GLA_EPSILON = 1e-5
LIGHTNING_EPSILON = 1e-6

SHALLOWEST = 0.4
"""γ of xPos: the fastest rotating pair decays by a factor of γ / (1 + γ) every `scale_base` tokens."""


class FixedDecayLayer(RecurrenceLayer):
    """A recurrence whose state decays by the same factor at every token."""

    _kept: Tensor | None = None

    @abstractmethod
    def log_decay(self, like: Tensor) -> Tensor:
        """The log decay per token, [heads, 1], or [heads, key_size] if each channel has its own rate."""

    def step_inputs(self, projected: Projections, batch: RaggedBatch, state: SlotsInPlace) -> RecurrentStepInputs:
        """See `RecurrenceLayer`; the decays are computed once per device."""
        like = projected.rows
        if self._kept is None or self._kept.device != like.device:
            self._kept = self.log_decay(like.new_empty(0, dtype=torch.float32))[None].contiguous()
        return dataclasses.replace(super().step_inputs(projected, batch, state), decay=DecayInputs(self._kept))


class RetentionPositions(NamedTuple):
    """The rotary positions of retention, and what else its decay depends on.

    With `scale_base` the rotated pairs decay as in xPos, each at its own rate; this requires `rotary`. `first_head` is
    the index of the first head of this part if the layer is split over ranks.
    """

    rotary: Rotary | None
    scale_base: float | None
    first_head: int


class RetentionLayer(FixedDecayLayer):
    """Retention (Sun et al. 2023, arXiv 2307.08621, equations 5 to 8). Learned besides the projections: `gate`."""

    further = ("gate",)

    def __init__(
        self,
        heads: Heads,
        *,
        hidden_size: int,
        bias: bool,
        chunk: int,
        positions: RetentionPositions,
        eps: float,
    ) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk)
        rotary, scale_base, _ = self.rotary, self.scale_base, self.first_head = positions
        self.eps = eps
        self.rotated = rotated_size(rotary, heads.key_size) if rotary else 0
        self.gate = fresh_linear(hidden_size, heads.query * heads.value_size, bias=False)
        self.step_spec = retention_step(heads, rotary, fades_apart=scale_base is not None)

    def steps(self, inputs: Inputs) -> Steps:
        """Rotated queries and keys, keys divided by √key_size, values, and the fixed decay."""
        query, key = inputs.query, inputs.key
        if self.rotary is not None:
            cos_sin = cos_sin_to(self.rotary, self.rotated, inputs.places.end, query).at(inputs.places.positions)
            query, key = (rotate(rows, cos_sin, interleaved=self.rotary.interleaved) for rows in (query, key))
        query, key, value = wide(query), wide(key) * self.heads.key_size**-0.5, wide(inputs.value)
        return Steps(query, key, value, self.log_decay(key)[None, None].expand(1, key.shape[1], -1, -1))

    def finish(self, out: Tensor, projected: Projections) -> Tensor:
        """Normalise each head, apply the gate, and project."""
        gate = by_heads(silu(wide(projected["gate"])), self.heads.query)
        return super().finish(rms_normed(out, None, self.eps) * gate, projected)

    def step_inputs(self, projected: Projections, batch: RaggedBatch, state: SlotsInPlace) -> RecurrentStepInputs:
        """See `RecurrenceLayer`."""
        cos_sin = None
        if self.rotary is not None:
            cos_sin = batch_cos_sin(self.rotary, self.rotated, projected.rows, batch)
        return dataclasses.replace(
            super().step_inputs(projected, batch, state),
            scales=(1.0, self.heads.key_size**-0.5),
            cos_sin=cos_sin,
            output=OutputInputs(eps=self.eps, gate=by_heads(projected["gate"], self.heads.query)),
        )

    def log_decay(self, like: Tensor) -> Tensor:
        """The log decay per token, [heads, 1], or [heads, key_size] if each rotated pair has its own rate."""
        head = log_retention(self.heads.query, like, self.first_head)
        if self.scale_base is None or self.rotary is None:
            return head
        scales = log_scales(self.rotary, self.rotated, like) / self.scale_base
        return head + pad(scales, (0, self.heads.key_size - self.rotated))


def log_scales(rotary: Rotary, rotated: int, like: Tensor) -> Tensor:
    """ln ζ = ln((2p/d + 0.4) / 1.4) for the pair p of each of the d rotated elements, [rotated], like `like`.

    See Sun et al. 2022, arXiv 2212.10554, algorithm 1 with γ = 0.4.
    """
    pairs = torch.arange(rotated // 2, dtype=torch.float64, device=like.device)
    scales = ((2 * pairs / rotated + SHALLOWEST) / (1 + SHALLOWEST)).log().to(like.dtype)
    return scales.repeat_interleave(2) if rotary.interleaved else scales.repeat(2)


def log_retention(heads: int, like: Tensor, first: int = 0) -> Tensor:
    """ln(1 - 2^(-5 - h)) of the heads h from `first`, [heads, 1], in the dtype and on the device of `like`."""
    exponents = -5.0 - torch.arange(first, first + heads, dtype=torch.float64, device=like.device)
    return torch.log1p(-torch.exp2(exponents))[:, None].to(like.dtype)


class GatedLinearLayer(RecurrenceLayer):
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635, §4.4).

    Learned besides the projections: `fade` (two `nn.Linear`, the second with a bias), `gate` and `norm` [value_size].
    """

    further = ("gate", "fade.0")

    def __init__(
        self, heads: Heads, *, hidden_size: int, bias: bool, chunk: int, rank: int, temperature: float
    ) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk)
        self.temperature = temperature
        self.fade = nn.Sequential(
            fresh_linear(hidden_size, rank, bias=False), fresh_linear(rank, heads.query * heads.key_size, bias=True)
        )
        self.gate = fresh_linear(hidden_size, heads.query * heads.value_size, bias=False)
        self.norm = nn.Parameter(torch.ones(heads.value_size))
        self.step_spec = gated_linear_step(heads)

    def steps(self, inputs: Inputs) -> Steps:
        """Queries divided by √key_size, keys, values, and the log decay of every channel."""
        decay = logsigmoid(wide(inputs.projected.through("fade"))) / self.temperature
        query = wide(inputs.query) * self.heads.key_size**-0.5
        return Steps(query, wide(inputs.key), wide(inputs.value), by_heads(decay, self.heads.query))

    def finish(self, out: Tensor, projected: Projections) -> Tensor:
        """Normalise each head, apply the gate, and project."""
        gate = by_heads(silu(wide(projected["gate"])), self.heads.query)
        return super().finish(rms_normed(out, self.norm, GLA_EPSILON) * gate, projected)

    def step_inputs(self, projected: Projections, batch: RaggedBatch, state: SlotsInPlace) -> RecurrentStepInputs:
        """See `RecurrenceLayer`."""
        gate, fade = projected["gate"], projected.through("fade")
        return dataclasses.replace(
            super().step_inputs(projected, batch, state),
            scales=(self.heads.key_size**-0.5, 1.0),
            decay=DecayInputs(by_heads(fade, self.heads.query), temperature=self.temperature),
            output=OutputInputs(norm=self.norm, eps=GLA_EPSILON, gate=by_heads(gate, self.heads.query)),
        )


class LightningLayer(FixedDecayLayer):
    """Lightning attention (Qin et al. 2024, arXiv 2401.04658), with the features of MiniMax-01 (2501.08313).

    Learned besides the projections: `gate` and `norm` [heads · value_size].
    """

    further = ("gate",)

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, chunk: int, slope_factor: float) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk)
        self.slope_factor = slope_factor
        self.gate = fresh_linear(hidden_size, heads.query * heads.value_size, bias=False)
        self.norm = nn.Parameter(torch.ones(heads.query * heads.value_size))
        self.step_spec = lightning_step(heads)

    def steps(self, inputs: Inputs) -> Steps:
        """SiLU of queries, keys and values, and the fixed decay."""
        query, key, value = (silu(wide(rows)) for rows in (inputs.query, inputs.key, inputs.value))
        return Steps(query, key, value, self.log_decay(key)[None, None].expand(1, key.shape[1], -1, 1))

    def finish(self, out: Tensor, projected: Projections) -> Tensor:
        """Normalise all heads together, apply the gate, and project."""
        normed = rms_normed(out.flatten(-2), self.norm, LIGHTNING_EPSILON)
        gated = normed * torch.sigmoid(wide(projected["gate"]))
        return super().finish(by_heads(gated, self.heads.query), projected)

    def log_decay(self, like: Tensor) -> Tensor:
        """The log decay per token, [heads, 1]: the negative slopes of ALiBi times the layer's factor."""
        return slopes_of(self.heads.query, like) * -self.slope_factor

    def step_inputs(self, projected: Projections, batch: RaggedBatch, state: SlotsInPlace) -> RecurrentStepInputs:
        """See `RecurrenceLayer`."""
        gate = by_heads(projected["gate"], self.heads.query)
        output = OutputInputs(norm=self.norm, eps=LIGHTNING_EPSILON, gate=gate)
        return dataclasses.replace(super().step_inputs(projected, batch, state), output=output)


def slopes_of(heads: int, like: Tensor) -> Tensor:
    """The slope 2^(-8h/H) of every head h, counted from 1, [heads, 1], in the dtype and on the device of `like`."""
    exponents = torch.arange(1, heads + 1, dtype=torch.float64, device=like.device) * (-8.0 / heads)
    return torch.exp2(exponents)[:, None].to(like.dtype)
