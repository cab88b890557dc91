"""The layer of Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from attn_core import LayerState, RaggedBatch, installed
from attn_core.batch import SlotsInPlace
from attn_core.kernels.recurrent_step import (
    ConvolutionInputs,
    DecayInputs,
    OutputInputs,
    RecurrentStepDispatcher,
    RecurrentStepInputs,
    RecurrentStepSpec,
)
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from attn_recurrent.mamba2.config import Mamba2Config
from attn_recurrent.mamba2.duality import System, one_chunk, weights
from attn_recurrent.sequences import by_heads, convolved, in_chunks, pieces, refuse_source, stepped

STEPS = (1e-3, 1e-1)
"""The range of initial step sizes, which are log-uniform, as in the authors' code."""


class Mamba2Layer(nn.Module):
    """The mixer of Mamba-2 over inputs of `hidden_size`.

    Learned: `input` (`nn.Linear` to gate, x, B, C and step sizes, in this order), `output`, `filters` [channels, taps],
    with the newest token last, `filter_bias` [channels], `rate` [heads], as natural logarithms, `step_bias` and `skip`
    [heads], and `norm` [inner].
    """

    one_chunk: Callable[[Any, Tensor], tuple[Tensor, Tensor]] = staticmethod(one_chunk)
    effective: Callable[[Any], Tensor] = staticmethod(weights)

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.config, hidden_size, bias = config, config.hidden_size, config.bias
        self.head, self.inner, self.channels = config.head, config.inner, config.channels
        self.widths = [config.inner, config.channels, config.num_heads, config.further]
        self.step_plan = RecurrentStepDispatcher(installed().kernels)
        self.step_spec, self.shape = config.step, config.memory
        self.input = nn.Linear(hidden_size, sum(self.widths), bias=bias)
        self.output = nn.Linear(config.inner, hidden_size, bias=bias)
        spread = config.taps**-0.5
        self.filters = nn.Parameter(torch.empty(config.channels, config.taps).uniform_(-spread, spread))
        self.filter_bias = nn.Parameter(torch.empty(config.channels).uniform_(-spread, spread))
        self.rate = nn.Parameter(torch.arange(1.0, config.num_heads + 1).log())
        step = torch.empty(config.num_heads).uniform_(*(math.log(size) for size in STEPS)).exp()
        # The inverse of softplus, so that the bias alone results in the step that was drawn.
        self.step_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.skip = nn.Parameter(torch.ones(config.num_heads))
        self.norm = nn.Parameter(torch.ones(config.inner))

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute whole sequences, [batch, tokens, hidden_size] to [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, is True for real tokens. Raises `InvalidValue` if a source is given.
        """
        refuse_source(source, "mamba2")
        return self._run(query, key_padding_mask, None, None)[0]

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The effective weights [batch, heads, query, key] of x in the output of each head, before skip and gate."""
        refuse_source(source, "mamba2")
        _, mixed, step, further = self._projected(query, key_padding_mask)
        system, _ = self._system(self._convolved(mixed, key_padding_mask, None)[0], step, further, None)
        step = step.transpose(1, 2)[:, :, None]
        return self.effective(system) * step

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, hidden_size] to [tokens, hidden_size].

        Reads and replaces the state "memory": "S" [requests, heads, state_size, head_dim], float32, and "tail"
        [requests, taps - 1, channels].
        """

        first = (places[:, :1] for places, _ in pieces(batch.positions, batch))

        def compute(rows: Tensor, memory: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            return self._run(rows, None, memory, tail, next(first))

        return stepped(self.step_plan, query, batch, state["memory"], self._step_in_place, compute)

    def _step_in_place(self, rows: Tensor, view: Any, request: int | None = None) -> Tensor | None:
        """The output of a decode step by a kernel that updates states in place, for all requests of a view or for one
        of them; None if there is no such kernel."""
        spec = self.step_spec
        if spec is None:
            return None
        out = self.step_plan.run(
            spec,
            rows,
            view,
            lambda memory: self._step_inputs(spec, rows, memory),
            gradients=torch.is_grad_enabled(),
            request=request,
        )
        if out is None:
            return None
        found: Tensor = self.output(out.to(rows.dtype))
        return found

    def _step_inputs(self, spec: RecurrentStepSpec, rows: Tensor, state: SlotsInPlace) -> RecurrentStepInputs:
        """The inputs of a kernel for a decode step with hidden states `rows` [requests, hidden_size]."""
        config, shared = self.config, self.config.groups * self.config.state_size
        parts = torch.split(self.input(rows), [self.inner, self.inner, shared, shared, config.num_heads], dim=-1)
        gate, value = (part.reshape(len(rows), config.num_heads, self.head) for part in parts[:2])
        writing, reading = (part.reshape(len(rows), config.groups, config.state_size) for part in parts[2:4])
        return RecurrentStepInputs(
            spec=spec,
            query=reading,
            key=writing,
            value=value,
            state=state,
            convolution=ConvolutionInputs(self.filters, self.filter_bias, (self.inner + shared, self.inner, 0)),
            decay=DecayInputs(parts[4][..., None], self.rate, self.step_bias[:, None]),
            output=OutputInputs(skip=self.skip, norm=self.norm, eps=self.config.norm_eps, gate=gate),
        )

    def _run(
        self,
        rows: Tensor,
        key_padding_mask: Tensor | None,
        memory: Tensor | None,
        tail: Tensor | None,
        first: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [batch, tokens, hidden_size], and the memory and the convolution's last inputs after them; `first`
        [batch, 1] are the positions of the first tokens, zeros if None."""
        gate, mixed, step, further = self._projected(rows, key_padding_mask)
        mixed, tail = self._convolved(mixed, key_padding_mask, tail)
        system, value = self._system(mixed, step, further, first)
        memory = value.new_zeros(rows.shape[0], *self.shape) if memory is None else memory.to(value.dtype)
        out, memory = in_chunks(self.one_chunk, system, memory, self.config.chunk)
        out = out + wide(self.skip)[:, None, None] * value
        return self._out(out.transpose(1, 2).flatten(-2), gate, rows.dtype), memory, tail

    def _projected(self, rows: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gates, the input of the convolution, step sizes, which are zero for padding, and `config.further` outputs."""
        gate, mixed, step, further = torch.split(wide(self.input(rows)), self.widths, dim=-1)
        step = softplus(step + wide(self.step_bias))
        if key_padding_mask is not None:
            step = torch.where(key_padding_mask[..., None], step, 0)
        return gate, mixed, step, further

    def _convolved(self, rows: Tensor, key_padding_mask: Tensor | None, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output of the convolution and SiLU for `rows` [batch, tokens, channels], and its last taps - 1 inputs."""
        if key_padding_mask is None:
            return convolved(rows, self.filters, self.filter_bias, tail)
        real = key_padding_mask[..., None]
        mixed, tail = convolved(torch.where(real, rows, 0), self.filters, self.filter_bias, tail)
        return torch.where(real, mixed, 0), tail

    def _system(
        self,
        mixed: Tensor,
        step: Tensor,
        further: Tensor,  # noqa: ARG002 -- of those with more
        first: Tensor | None,  # noqa: ARG002 -- of those that count
    ) -> tuple[Any, Tensor]:
        """What `one_chunk` and `effective` take, of the output of the convolution, step sizes, further outputs of the
        first layer and first positions, and x [batch, heads, tokens, head_dim]."""
        config = self.config
        shared = config.groups * config.state_size
        value, writing, reading = torch.split(mixed, [self.inner, shared, shared], dim=-1)
        value = by_heads(value, config.num_heads)
        step = step.transpose(1, 2)[..., None]
        decay = -wide(self.rate).exp()[:, None, None] * step
        system = System(by_heads(reading, config.groups), by_heads(writing, config.groups), value * step, decay)
        return system, value

    def _out(self, out: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        gated = out * silu(gate)
        groups = gated.reshape(*gated.shape[:-1], self.config.groups, self.inner // self.config.groups)
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.config.norm_eps)
        projected: Tensor = self.output((normed.flatten(-2) * wide(self.norm)).to(dtype))
        return projected
