"""Recurrent and declared mechanisms: sound ones, and ones whose faults no single short call shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    ComputedMechanism,
    Cost,
    DeclaredMechanism,
    Field,
    LayerState,
    MechanismConfig,
    RaggedBatch,
    Shape,
    Slot,
    StateSpecs,
    Step,
)
from attn_core.checks import require_whole
from attn_core.distributions import SoftmaxOne
from attn_core.scores import ScaledDot
from torch import Tensor, nn

from broken.sound import VASWANI, Sound

CHUNK = 64


class SummingLayer(nn.Module):
    """Linear attention without a feature map: o_t = S_t^T q_t where S_t sums k v^T, computed in chunks."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__()
        width, self.chunk = config.hidden_size, Summing.Config.of(config).chunk
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, query: Tensor) -> Tensor:
        """Outputs [batch, tokens, width]."""
        queries, keys, values = self.query(query), self.key(query), self.value(query)
        held, out = self.first(query[:, 0]), []
        for start in range(0, query.shape[1], self.chunk):
            q, k, v = (rows[:, start : start + self.chunk] for rows in (queries, keys, values))
            out.append(q @ self.passed(held) + (q @ k.transpose(1, 2)).tril() @ v)
            held = held + k.transpose(1, 2) @ v
        return torch.cat(out, 1)

    def first(self, rows: Tensor) -> Tensor:
        """The state [batch, width, width] before the first token, for rows [batch, width]."""
        return rows.new_zeros(rows.shape[0], rows.shape[1], rows.shape[1])

    def passed(self, held: Tensor) -> Tensor:
        """The state that a chunk gets from the one before; subclasses override this."""
        return held

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Outputs [tokens, width], token by token."""
        sums, out = list(self.read(state)), []
        queries, keys, values = self.query(query), self.key(query), self.value(query)
        for span in batch.spans():
            for row in range(span.start, span.stop):
                sums[span.request] = sums[span.request] + keys[row, :, None] * values[row]
                out.append(queries[row] @ sums[span.request])
        self.write(state, torch.stack(sums))
        return torch.stack(out)

    def read(self, state: LayerState) -> Tensor:
        """The states [requests, width, width] before the step."""
        held: Tensor = state["sums"].read()["sum"]
        return held

    def write(self, state: LayerState, sums: Tensor) -> None:
        """Store the states after the step."""
        state["sums"].write({"sum": sums})


class Summing(ComputedMechanism):
    """A recurrent mechanism that keeps every law."""

    name = "sound_recurrent"
    summary = "Sums of outer products."
    paper = VASWANI
    equation = r"S_t = S_{t-1} + k_t v_t^\top,\quad o_t = S_t^\top q_t"
    capabilities = frozenset({Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT})
    sequential = True
    layer: ClassVar[type[nn.Module]] = SummingLayer

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """The config with the number of tokens of a `chunk`."""

        chunk: int = CHUNK

        def __post_init__(self) -> None:
            super().__post_init__()
            require_whole("chunk", self.chunk, ge=1)

    def build(self, config: MechanismConfig) -> nn.Module:
        """Build a new layer."""
        return self.layer(config)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The sum of outer products."""
        return {"sums": Slot({"sum": Field((config.hidden_size, config.hidden_size))})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """Three projections and, in whole sequences, four products a chunk."""
        width, tokens = config.hidden_size, shape.batch * shape.query
        flops = tokens * 8 * width**2
        if isinstance(shape, Shape):
            most = self.Config.of(config).chunk
            chunks = [min(most, shape.query - start) for start in range(0, shape.query, most)]
            flops += tokens * 2 * width**2 + shape.batch * sum(4 * chunk**2 * width for chunk in chunks)
        return Cost(flops=flops, allowed_flops=flops, parameters=3 * width**2)


class ForgetsSeamLayer(SummingLayer):
    """Rounds the state from one chunk to the next."""

    def passed(self, held: Tensor) -> Tensor:
        """The state in 16 bits."""
        return held + (held.bfloat16().to(held.dtype) - held).detach()


class ForgetsSeam(Summing):
    """Chunks behind the first compute with a rounded state: a fault behind 64 tokens."""

    layer = ForgetsSeamLayer


class CutsGradientLayer(SummingLayer):
    """Detaches the state between chunks."""

    def passed(self, held: Tensor) -> Tensor:
        """The state, without gradients."""
        return held.detach()


class CutsGradient(Summing):
    """A lost gradient: none crosses the border of two chunks."""

    layer = CutsGradientLayer


class TwoSumsLayer(SummingLayer):
    """Stores its sum twice."""

    def write(self, state: LayerState, sums: Tensor) -> None:
        """Store the states and a copy."""
        state["sums"].write({"sum": sums, "copy": sums})


class TwoSums(Summing):
    """State bytes that agree only with themselves: the second copy is never read."""

    layer = TwoSumsLayer

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The sum of outer products, twice."""
        size = Field((config.hidden_size, config.hidden_size))
        return {"sums": Slot({"sum": size, "copy": size})}


class OnLayerLayer(SummingLayer):
    """Keeps the state of a lone request on the layer, too, and trusts that."""

    own: Tensor | None = None

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """See `SummingLayer.step`."""
        if batch.contexts[0] == 0:
            self.own = None
        return super().step(query, batch, state)

    def read(self, state: LayerState) -> Tensor:
        """The states, of which that of a lone request comes from the layer."""
        held = super().read(state)
        return self.own if self.own is not None and self.own.shape == held.shape and len(held) == 1 else held

    def write(self, state: LayerState, sums: Tensor) -> None:
        """Store the states."""
        self.own = sums if len(sums) == 1 else self.own
        super().write(state, sums)


class OnLayer(Summing):
    """A state shared between requests: that of a lone request is kept on the layer."""

    layer = OnLayerLayer


class SumsOnHostLayer(SummingLayer):
    """Starts its sums on the CPU."""

    def first(self, rows: Tensor) -> Tensor:
        """Zeros on the CPU."""
        return torch.zeros(rows.shape[0], rows.shape[1], rows.shape[1], dtype=rows.dtype)


class SumsOnHost(Summing):
    """A device is assumed by a recurrence."""

    layer = SumsOnHostLayer


class Specified(DeclaredMechanism):
    """Plain causal attention as data, which keeps every law."""

    name = "sound_spec"
    summary = "Scaled dot-product attention, declared."
    paper = VASWANI
    equation = r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V"
    capabilities = Sound.capabilities - {Capability.BIDIRECTIONAL}

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Causal attention with heads of the config."""
        return AttentionSpec(heads=config.head_layout, mask=Causal())


class WrongSpecScale(Specified):
    """A declared scale that is not that of the equation."""

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Causal attention with scores scaled by 0.3."""
        return AttentionSpec(heads=config.head_layout, mask=Causal(), score=ScaledDot(scale=0.3))


class OtherEquation(Specified):
    """A distribution that is not that of the equation."""

    capabilities = Specified.capabilities - {Capability.NORMALISED}

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Causal attention with one more in the denominator."""
        return AttentionSpec(heads=config.head_layout, mask=Causal(), distribution=SoftmaxOne())


class CostlyForward(Specified):
    """A wrong price: beyond 64 keys, no further key is counted in whole sequences."""

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of at most 64 keys."""
        counted = min(CHUNK, shape.query)
        return super().cost(config, Shape(batch=shape.batch, query=counted, key=counted) if shape.whole else shape)
