"""Layers of linear recurrences."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import NamedTuple, cast

import torch
from attn_core import Heads, LayerState, RaggedBatch, Rotary, installed
from attn_core.kernels.linear import Pack
from attn_core.kernels.recurrence import RecurrenceDispatcher, Steps
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, silu, softplus

from attn_variants.compute.rotary import cos_sin_to, rotate, rotated_size
from attn_variants.layer_utils import (
    JointProjection,
    by_heads,
    fresh_linear,
    multiplied_in,
    refuse_source,
    rms_normed,
    unit,
)
from attn_variants.mechanisms.recurrence_scan import effective_weights


class ShortConvolution(nn.Module):
    """Each channel is the SiLU of a weighted sum of its last `taps` values.

    Learned: `weight` [channels, taps], the newest token last, uniform in ±1/√taps as torch's convolutions.
    """

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(channels, taps).uniform_(-(taps**-0.5), taps**-0.5))

    def forward(self, rows: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows [batch, tokens, channels] convolved, and the last taps - 1 rows, [batch, taps - 1, channels].

        `tail` are those before the first row; None is zeros, the start of a sequence.
        """
        batch, tokens, channels = rows.shape
        if tail is None:
            tail = rows.new_zeros(batch, self.taps - 1, channels)
        known = torch.cat([tail.to(rows.dtype), rows], dim=1)
        weight = self.weight.to(rows.dtype)
        summed = known[:, :tokens] * weight[:, 0]
        for tap in range(1, self.taps):
            summed = torch.addcmul(summed, known[:, tap : tap + tokens], weight[:, tap])
        return silu(summed), known[:, tokens:]


class Places(NamedTuple):
    """`positions` [batch or 1, tokens], int64, of some tokens, all of them below `end`."""

    positions: Tensor
    end: int


class Inputs(NamedTuple):
    """What the steps of some tokens are made of.

    `rows` [batch, tokens, hidden_size]; `query`, `key`, `value` [batch, tokens, heads, size], projected, and convolved
    where the layer has a convolution.
    """

    rows: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    places: Places


class RecurrenceLayer(nn.Module):
    """A linear recurrence over inputs of `hidden_size`; a subclass makes its `steps` and may `finish` what they read.

    `chunk` tokens meet pair by pair, which changes the speed only; `taps` of a short convolution over queries, keys
    and values, 0 for none; `plan` chooses the kernel. Learned: `query`, `key`, `value`, `output` (`nn.Linear`) and
    `convolution`. What is remembered is at least float32, whatever the inputs are; so are the steps, but for kernels
    that take queries, keys and values of 16 bits.
    """

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, chunk: int, taps: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.chunk = chunk
        self.plan = RecurrenceDispatcher(installed().kernels)
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        self.query: nn.Module = fresh_linear(hidden_size, into, bias=bias)
        self.key: nn.Module = fresh_linear(hidden_size, into, bias=bias)
        self.value: nn.Module = fresh_linear(hidden_size, out, bias=bias)
        self.output: nn.Module = fresh_linear(out, hidden_size, bias=bias)
        self.joint: JointProjection | None = None
        self.convolution = ShortConvolution(2 * into + out, taps) if taps else None

    @abstractmethod
    def steps(self, inputs: Inputs) -> Steps:
        """The steps of some tokens."""

    def pack(self, pack: Pack) -> None:
        """Pack queries, keys and values for serving as one projection, and the output."""
        layers = [cast("nn.Linear", layer) for layer in (self.query, self.key, self.value)]
        self.joint = JointProjection.of(pack, layers)
        self.query, self.key, self.value = self.joint.parts()
        self.output = pack([cast("nn.Linear", self.output)])

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """The layer's output [batch, tokens, hidden_size] of what was read, [batch, tokens, heads, value_size]."""
        projected: Tensor = self.output(out.flatten(-2).to(rows.dtype))
        return projected

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend over whole sequences [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` where a source is
        given.
        """
        steps, _ = self.read(query, source, key_padding_mask)
        return self.finish(self.attend(steps, multiplied_in(query)), query)

    def attend(self, steps: Steps, computed: torch.dtype) -> Tensor:
        """What whole sequences read, [batch, tokens, heads, value_size]; `computed` as of
        `RecurrenceDispatcher.handed`.
        """
        return self.plan.run(steps, None, self.chunk, computed)[0]

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The effective weights [batch, heads, query, key] of the values in what each head reads.

        They may be negative and need not sum to one; norms and gates that follow are not in them.
        """
        return effective_weights(self.read(query, source, key_padding_mask)[0])

    def read(self, rows: Tensor, source: Tensor | None, key_padding_mask: Tensor | None) -> tuple[Steps, Tensor | None]:
        """The steps of whole sequences; raises `InvalidValue` where a source is given."""
        refuse_source(source)
        positions = torch.arange(rows.shape[1], device=rows.device)[None]
        return self._steps(rows, Places(positions, rows.shape[1]), key_padding_mask, None)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, hidden_size] of many requests; returns [tokens, hidden_size].

        Reads and replaces the state "memory": "S" [requests, heads, key_size, value_size], float32, and with a
        convolution "tail" [requests, taps - 1, channels], its last inputs.
        """
        before = state["memory"].read()
        if batch.decoding:
            out, after = self._decode(query, batch, before["S"], before.get("tail"))
        else:
            out, after = self._prefill(query, batch, before["S"], before.get("tail"))
        state["memory"].write({name: part.to(before[name].dtype) for name, part in after.items()})
        return self.finish(out[None], query[None])[0]

    def _decode(
        self, rows: Tensor, batch: RaggedBatch, memory: Tensor, tail: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        steps, tail = self._steps(rows[:, None], Places(batch.positions[:, None], batch.longest), None, tail)
        out, after = self.plan.decode(steps, memory.to(steps.value.dtype))
        return out[:, 0], _kept(after, tail)

    def _prefill(
        self, rows: Tensor, batch: RaggedBatch, memory: Tensor, tail: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        pieces, memories, tails = [], [], []
        for span in batch.spans():
            piece, request = slice(span.start, span.stop), slice(span.request, span.request + 1)
            mine = None if tail is None else tail[request]
            places = Places(batch.positions[None, piece], batch.longest)
            steps, mine = self._steps(rows[None, piece], places, None, mine)
            held = memory[request].to(steps.value.dtype)
            if span.stop - span.start == 1:
                # As in a step of single tokens, so that company changes nothing.
                seen, after = self.plan.decode(steps, held)
            else:
                seen, after = self.plan.run(steps, held, self.chunk, multiplied_in(rows))
            pieces.append(seen[0])
            memories.append(after)
            tails.append(mine)
        left = None if tail is None else torch.cat(tails)  # type: ignore[arg-type]
        return torch.cat(pieces), _kept(torch.cat(memories), left)

    def _steps(
        self, rows: Tensor, places: Places, key_padding_mask: Tensor | None, tail: Tensor | None
    ) -> tuple[Steps, Tensor | None]:
        query, key, value = self._projected(rows)
        if self.convolution is not None:
            mixed = wide(torch.cat([query, key, value], dim=-1))
            mixed = mixed if key_padding_mask is None else torch.where(key_padding_mask[..., None], mixed, 0)
            mixed, tail = self.convolution(mixed, tail)
            query, key, value = mixed.split([query.shape[-1], key.shape[-1], value.shape[-1]], dim=-1)
        query, key, value = (by_heads(part, self.heads.query) for part in (query, key, value))
        return self.steps(Inputs(rows, query, key, value, places)).kept(key_padding_mask), tail

    def _projected(self, rows: Tensor) -> list[Tensor]:
        """Queries, keys and values [batch, tokens, heads · size]."""
        if self.joint is not None:
            return self.joint(rows)  # type: ignore[no-any-return]
        return [self.query(rows), self.key(rows), self.value(rows)]


def _kept(memory: Tensor, tail: Tensor | None) -> dict[str, Tensor]:
    return {"S": memory} if tail is None else {"S": memory, "tail": tail}


RETENTION_EPSILON = 1e-6
GLA_EPSILON = 1e-5
LIGHTNING_EPSILON = 1e-6

SHALLOWEST = 0.4
"""γ of xPos: the pair that turns fastest fades by γ / (1 + γ)."""


class RetentionLayer(RecurrenceLayer):
    """Retention (Sun et al. 2023, arXiv 2307.08621, equations 5 to 8). Learned beside the projections: `gate`.

    With `scale_base` the turned pairs fade as in xPos, each at its own rate; it needs `rotary`. `first_head` is the
    place of the first head among all of a layer that is split.
    """

    def __init__(
        self,
        heads: Heads,
        *,
        hidden_size: int,
        bias: bool,
        chunk: int,
        rotary: Rotary | None,
        scale_base: float | None = None,
        first_head: int = 0,
    ) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk)
        self.rotary = rotary
        self.scale_base = scale_base
        self.first_head = first_head
        self.rotated = rotated_size(rotary, heads.key_size) if rotary else 0
        self.gate = fresh_linear(hidden_size, heads.query * heads.value_size, bias=False)

    def steps(self, inputs: Inputs) -> Steps:
        """Queries and keys turned to their positions, keys over √key_size, and the fixed decay."""
        query, key = inputs.query, inputs.key
        if self.rotary is not None:
            cos_sin = cos_sin_to(self.rotary, self.rotated, inputs.places.end, query).at(inputs.places.positions)
            query, key = (rotate(rows, cos_sin, interleaved=self.rotary.interleaved) for rows in (query, key))
        query, key, value = wide(query), wide(key) * self.heads.key_size**-0.5, wide(inputs.value)
        return Steps(query, key, value, self._decay(key)[None, None].expand(1, key.shape[1], -1, -1))

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Each head normed, gated and projected."""
        gate = by_heads(silu(wide(self.gate(rows))), self.heads.query)
        return super().finish(rms_normed(out, None, RETENTION_EPSILON) * gate, rows)

    def _decay(self, like: Tensor) -> Tensor:
        """Log decays of a token, [heads, 1], or [heads, key_size] where pairs have rates of their own."""
        head = log_retention(self.heads.query, like, self.first_head)
        if self.scale_base is None or self.rotary is None:
            return head
        scales = log_scales(self.rotary, self.rotated, like) / self.scale_base
        return head + pad(scales, (0, self.heads.key_size - self.rotated))


def log_scales(rotary: Rotary, rotated: int, like: Tensor) -> Tensor:
    """ln((2p/d + 0.4) / 1.4) of the pair p of each of d turned elements, [rotated], as `like`.

    ζ of the paper (Sun et al. 2022, arXiv 2212.10554, algorithm 1 with γ = 0.4).
    """
    pairs = torch.arange(rotated // 2, dtype=torch.float64, device=like.device)
    scales = ((2 * pairs / rotated + SHALLOWEST) / (1 + SHALLOWEST)).log().to(like.dtype)
    return scales.repeat_interleave(2) if rotary.interleaved else scales.repeat(2)


def log_retention(heads: int, like: Tensor, first: int = 0) -> Tensor:
    """ln(1 - 2^(-5 - h)) of the heads h from `first`, [heads, 1], in the type and on the device of `like`."""
    exponents = -5.0 - torch.arange(first, first + heads, dtype=torch.float64, device=like.device)
    return torch.log1p(-torch.exp2(exponents))[:, None].to(like.dtype)


class GatedLinearLayer(RecurrenceLayer):
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635, §4.4).

    Learned beside the projections: `fade` (two `nn.Linear`, the second with a bias), `gate` and `norm` [value_size].
    """

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

    def steps(self, inputs: Inputs) -> Steps:
        """Queries over √key_size, and the log of every channel's gate."""
        decay = logsigmoid(wide(self.fade(inputs.rows))) / self.temperature
        query = wide(inputs.query) * self.heads.key_size**-0.5
        return Steps(query, wide(inputs.key), wide(inputs.value), by_heads(decay, self.heads.query))

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Each head normed, gated and projected."""
        gate = by_heads(silu(wide(self.gate(rows))), self.heads.query)
        return super().finish(rms_normed(out, self.norm, GLA_EPSILON) * gate, rows)


class LightningLayer(RecurrenceLayer):
    """Lightning attention (Qin et al. 2024, arXiv 2401.04658), with the features of MiniMax-01 (2501.08313).

    Learned beside the projections: `norm` [heads · value_size].
    """

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, chunk: int) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk)
        self.norm = nn.Parameter(torch.ones(heads.query * heads.value_size))

    def steps(self, inputs: Inputs) -> Steps:
        """SiLU of queries, keys and values, and the fixed decay."""
        query, key, value = (silu(wide(rows)) for rows in (inputs.query, inputs.key, inputs.value))
        decay = -slopes_of(self.heads.query, key)
        return Steps(query, key, value, decay[None, None].expand(1, key.shape[1], -1, 1))

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """All heads normed as one row, and projected."""
        return super().finish(
            by_heads(rms_normed(out.flatten(-2), self.norm, LIGHTNING_EPSILON), self.heads.query), rows
        )


def slopes_of(heads: int, like: Tensor) -> Tensor:
    """The slope 2^(-8h/H) of every head h from 1, [heads, 1], in the type and on the device of `like`."""
    exponents = torch.arange(1, heads + 1, dtype=torch.float64, device=like.device) * (-8.0 / heads)
    return torch.exp2(exponents)[:, None].to(like.dtype)


DELTA_EPSILON = 1e-5


class DeltaLayer(RecurrenceLayer):
    """DeltaNet (Yang et al. 2024, arXiv 2406.06484, §3.4).

    Learned beside the projections: `convolution`, `strength` (`nn.Linear` to one number a head) and `norm`
    [value_size].
    """

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, chunk: int, taps: int) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk, taps=taps)
        self.strength = fresh_linear(hidden_size, heads.query, bias=False)
        self.norm = nn.Parameter(torch.ones(heads.value_size))

    def steps(self, inputs: Inputs) -> Steps:
        """Queries and keys of length one, queries over √key_size, and the strength of every write."""
        query, key, value = (wide(rows) for rows in (inputs.query, inputs.key, inputs.value))
        if self.convolution is None:
            # The convolution has it already.
            query, key, value = silu(query), silu(key), silu(value)
        strength = torch.sigmoid(wide(self.strength(inputs.rows)))
        return Steps(unit(query) * self.heads.key_size**-0.5, unit(key), value, strength=strength)

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Each head normed, and projected."""
        return super().finish(rms_normed(out, self.norm, DELTA_EPSILON), rows)


RATES = (1.0, 16.0)
STEPS = (1e-3, 1e-1)
"""Ranges that the decay is drawn from, as in the authors' code: a head's rate evenly, a channel's step log-evenly."""


class KimiDeltaLayer(DeltaLayer):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, §3).

    Learned beside DeltaNet's: `fade` and `gate` (two `nn.Linear` each), `rate` [heads], natural logarithms, and
    `step_bias` [heads, key_size].
    """

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, chunk: int, taps: int) -> None:
        super().__init__(heads, hidden_size=hidden_size, bias=bias, chunk=chunk, taps=taps)
        into, out, rank = heads.query * heads.key_size, heads.query * heads.value_size, heads.value_size
        self.fade = nn.Sequential(fresh_linear(hidden_size, rank, bias=False), fresh_linear(rank, into, bias=False))
        self.gate = nn.Sequential(fresh_linear(hidden_size, rank, bias=False), fresh_linear(rank, out, bias=False))
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
        return super(DeltaLayer, self).finish(rms_normed(out, self.norm, DELTA_EPSILON) * gate, rows)
