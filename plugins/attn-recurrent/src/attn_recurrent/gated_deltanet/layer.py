"""The layer of Gated DeltaNet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from attn_core import LayerState, RaggedBatch, installed
from attn_core.batch import SlotsInPlace
from attn_core.errors import Incompatible
from attn_core.kernels.linear import Pack
from attn_core.kernels.recurrence import RecurrenceDispatcher, Steps
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
from torch.nn.functional import pad, silu, softplus

from attn_recurrent.gated_deltanet.config import GatedDeltaConfig
from attn_recurrent.gated_deltanet.rule import Rule, one_chunk, weights
from attn_recurrent.sequences import by_heads, convolved, in_chunks, refuse_source, stepped

UNIT_EPS = 1e-6


class Projected(NamedTuple):
    """The outputs of the linear layers of these names for hidden states [..., hidden_size]."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    fade: Tensor
    strength: Tensor


class Joint(nn.Module):
    """Several layers that read the same input, joined to `whole`, which returns their outputs, of `sizes` elements
    each, concatenated."""

    def __init__(self, whole: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.whole = whole
        self.sizes = list(sizes)

    def forward(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The outputs [..., size] of each layer."""
        return torch.split(self.whole(rows), self.sizes, dim=-1)


class JointPart(nn.Module):
    """One of the layers of a `Joint`; a call computes the others too."""

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        self.joint = joint
        self.index = index

    def forward(self, rows: Tensor) -> Tensor:
        """The outputs [..., size] of this layer alone."""
        parts: tuple[Tensor, ...] = self.joint(rows)
        return parts[self.index]


class GatedDeltaLayer(nn.Module):
    """Gated DeltaNet over inputs of the config's `hidden_size`.

    Learned: `query`, `key`, `value`, `gate`, `fade` (decay), `strength` (β), `output` (`nn.Linear`), `filters`
    [channels, taps], with the newest token last, `rate` [heads], as natural logarithms, `fade_bias` [heads] and `norm`
    [value_size].

    With several writes a token has so many keys, values and strengths: it is as many tokens to the rule, the first of
    which decays, and the last of which is read.
    """

    gating: Callable[[Tensor], Tensor] = staticmethod(silu)
    one_chunk: Callable[[Any, Tensor], tuple[Tensor, Tensor]] = staticmethod(one_chunk)
    effective: Callable[[Any], Tensor] = staticmethod(weights)

    def __init__(self, config: GatedDeltaConfig) -> None:
        super().__init__()
        sizes, hidden_size, bias, taps = config.sizes, config.hidden_size, config.bias, config.taps
        self.sizes, self.chunk, self.eps, self.shape = sizes, config.chunk, config.norm_eps, config.memory
        self.strongest = 2.0 if config.allow_neg_eigval else 1.0
        self.plan = RecurrenceDispatcher(installed().kernels)
        self.step_plan = RecurrentStepDispatcher(installed().kernels)
        self.by_kernels, self.step_spec = config.by_kernels, config.step
        self.joint: Joint | None = None
        self.query = nn.Linear(hidden_size, sizes.into, bias=bias)
        self.key = nn.Linear(hidden_size, sizes.writes * sizes.into, bias=bias)
        self.value = nn.Linear(hidden_size, sizes.writes * sizes.out, bias=bias)
        self.gate: nn.Module = nn.Linear(hidden_size, sizes.out, bias=False)
        self.fade: nn.Module = nn.Linear(hidden_size, config.fades, bias=False)
        self.strength = nn.Linear(hidden_size, config.strengths, bias=False)
        self.output: nn.Module = nn.Linear(sizes.out, hidden_size, bias=bias)
        self.filters = nn.Parameter(torch.empty(config.convolved, taps).uniform_(-(taps**-0.5), taps**-0.5))
        self.rate = nn.Parameter(torch.empty(config.fades).uniform_(0.01, 16).log())
        self.fade_bias = nn.Parameter(torch.ones(config.fades))
        self.norm = nn.Parameter(torch.ones(sizes.value))

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute whole sequences, [batch, tokens, hidden_size] to [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, is True for real tokens. Raises `InvalidValue` if a source is given.
        """
        refuse_source(source, "gated_deltanet")
        projected = self._projected(query)
        rule, _ = self._rule(projected, key_padding_mask, None)
        return self._out(self._read(rule, self._empty(rule), query)[0], projected.gate, query.dtype)

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The effective weights [batch, heads, query, key] of the values in each head's output, before its norm.

        Raises `Incompatible` where a token has several values.
        """
        if self.sizes.writes > 1:
            raise Incompatible(f"a token has {self.sizes.writes} values, whose weights are not one number")
        refuse_source(source, "gated_deltanet")
        return self.effective(self._rule(self._projected(query), key_padding_mask, None)[0])

    def join(self, pack: Pack) -> None:
        """Join all layers that read the input to one matrix of floats, so that no format rounds their outputs."""
        layers = {name: layer for name, layer in self.named_children() if name in Projected._fields}
        single = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
        self.joint = Joint(pack(list(single.values())), [layer.out_features for layer in single.values()])
        for index, name in enumerate(single):
            setattr(self, name, JointPart(self.joint, index))
        self.output = pack([cast("nn.Linear", self.output)])

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, hidden_size] to [tokens, hidden_size].

        Reads and replaces the state "memory": "S" [requests, heads, key_size, value_size], float32, and "tail"
        [requests, taps - 1, channels].
        """

        def compute(rows: Tensor, memory: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            projected = self._projected(rows)
            rule, tail = self._rule(projected, None, tail)
            out, memory = self._read(rule, memory.to(rule.value.dtype), rows)
            return self._out(out, projected.gate, rows.dtype), memory, tail

        return stepped(self.step_plan, query, batch, state["memory"], self._step_in_place, compute)

    def _step_in_place(self, rows: Tensor, view: Any, request: int | None = None) -> Tensor | None:
        """The output of a decode step by a kernel that updates states in place, for all requests of a view or for one
        of them; None if there is no such kernel, or if another kernel was chosen by name."""
        spec = self.step_spec
        if self.plan.name is not None or spec is None:
            return None

        def inputs(state: SlotsInPlace) -> RecurrentStepInputs:
            return self._step_inputs(spec, self._projected(rows), state)

        gradients = torch.is_grad_enabled()
        out = self.step_plan.run(spec, rows, view, inputs, gradients=gradients, request=request)
        if out is None:
            return None
        found: Tensor = self.output(out.to(rows.dtype))
        return found

    def _step_inputs(self, spec: RecurrentStepSpec, projected: Projected, state: SlotsInPlace) -> RecurrentStepInputs:
        sizes = self.sizes
        query, key = (part.reshape(len(part), sizes.key_heads, sizes.key) for part in projected[:2])
        value, gate = (part.reshape(len(part), sizes.heads, sizes.value) for part in projected[2:4])
        return RecurrentStepInputs(
            spec=spec,
            query=query,
            key=key,
            value=value,
            state=state,
            scales=(sizes.key**-0.5, 1.0),
            convolution=ConvolutionInputs(self.filters, None, (0, sizes.into, 2 * sizes.into)),
            decay=DecayInputs(projected.fade[..., None], self.rate, self.fade_bias[:, None]),
            strength=projected.strength,
            output=OutputInputs(norm=self.norm, eps=self.eps, gate=gate),
        )

    def _projected(self, rows: Tensor) -> Projected:
        """The outputs of all layers that read the input, for `rows` [..., hidden_size]."""
        layers = {name: getattr(self, name) for name in Projected._fields}
        if self.joint is None:
            return Projected(**{name: layer(rows) for name, layer in layers.items()})
        parts = self.joint(rows)
        found = {
            name: parts[layer.index] if isinstance(layer, JointPart) else layer(rows) for name, layer in layers.items()
        }
        return Projected(**found)

    def _read(self, rule: Any, memory: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs and the memory after them, computed by a kernel if that is faster; `rows` [batch, tokens,
        hidden_size] are the layer's input.
        """
        if not self.by_kernels:
            out, memory = self._by_chunks(rule, memory)
            return out[:, :, self.sizes.writes - 1 :: self.sizes.writes], memory
        query, key, value, decay, strength = (part.transpose(1, 2) for part in rule)
        steps = Steps(query, key, value, decay, strength[..., 0])
        single = rows.shape[1] == 1
        # A graph of any number of tokens takes the kernel that scans them, as ONNX solves no triangular systems.
        below = math.inf if torch.compiler.is_exporting() else 1.0
        found = self.plan.run_below(steps, memory, self.chunk, multiplied_in(rows), single=single, below=below)
        if found is None:
            return self._by_chunks(rule, memory)
        out, memory = found
        return out.transpose(1, 2).to(rule.value.dtype), memory

    def _by_chunks(self, rule: Any, memory: Tensor) -> tuple[Tensor, Tensor]:
        return in_chunks(self.one_chunk, rule.writes() if isinstance(rule, Rule) else rule, memory, self.chunk)

    def _rule(self, projected: Projected, key_padding_mask: Tensor | None, tail: Tensor | None) -> tuple[Any, Tensor]:
        given = wide(torch.cat(projected[:3], dim=-1))
        given = given if key_padding_mask is None else torch.where(key_padding_mask[..., None], given, 0)
        sizes, through = self.sizes, len(self.filters)
        mixed, tail = convolved(given[..., :through], self.filters, None, tail)
        widths = [sizes.into, sizes.writes * sizes.into, sizes.writes * sizes.out]
        query, key, value = torch.split(torch.cat([mixed, given[..., through:]], dim=-1), widths, dim=-1)
        decay, strength = self._gates(wide(projected.fade), wide(projected.strength))
        if key_padding_mask is not None:
            decay, strength = (torch.where(key_padding_mask[..., None], part, 0) for part in (decay, strength))
        if sizes.writes > 1:
            key, value, strength = (self._writes(part) for part in (key, value, strength))
            query = pad(query[:, :, None], (0, 0, sizes.writes - 1, 0)).flatten(1, 2)
            decay = pad(decay[:, :, None], (0, 0, 0, sizes.writes - 1)).flatten(1, 2)
        query, key = (self._for_each_head(unit(part)) for part in self._asked(query, key))
        return self._inputs(query * sizes.key**-0.5, key, by_heads(value, sizes.heads), decay, strength), tail

    def _gates(self, fade: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        """Log decays and strengths, of the outputs of `fade` and `strength`; both are set to zero for padding."""
        decay = -wide(self.rate).exp() * softplus(fade + wide(self.fade_bias))
        return decay, strength.sigmoid() * self.strongest

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Any:
        """What `one_chunk` and `effective` take, of queries, keys and values [batch, heads, tokens, size] and what
        `_gates` gives: a `Rule`, or a NamedTuple of other inputs."""
        return Rule(query, key, value, *(part.transpose(1, 2)[..., None] for part in (decay, strength)))

    def _asked(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [batch, key_heads, tokens, key] before they are normalised."""
        return by_heads(query, self.sizes.key_heads), by_heads(key, self.sizes.key_heads)

    def _writes(self, rows: Tensor) -> Tensor:
        """The parts of rows [batch, tokens, writes · size] as tokens of their own, [batch, tokens · writes, size]."""
        return torch.unflatten(rows, -1, (self.sizes.writes, -1)).flatten(1, 2)

    def _for_each_head(self, rows: Tensor) -> Tensor:
        """Repeat queries or keys [batch, key_heads, tokens, key] for each head, [batch, heads, tokens, key]."""
        repeats = self.sizes.heads // self.sizes.key_heads
        return rows if repeats == 1 else rows.repeat_interleave(repeats, dim=1)

    def _empty(self, rule: Any) -> Tensor:
        empty: Tensor = rule.value.new_zeros(rule.value.shape[0], *self.shape)
        return empty

    def _out(self, read: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + self.eps) * wide(self.norm)
        gated = normed.transpose(1, 2).flatten(-2) * self.gating(wide(gate))
        projected: Tensor = self.output(gated.to(dtype))
        return projected


def multiplied_in(rows: Tensor) -> torch.dtype:
    """The dtype in which linear layers multiply `rows`: that of autocast if it is on, else that of `rows`."""
    kind = rows.device.type
    # The meta device has no autocast, and torch raises when asked for it.
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else rows.dtype


def unit(rows: Tensor) -> Tensor:
    """Normalise `rows` [..., size] to length one."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + UNIT_EPS)
