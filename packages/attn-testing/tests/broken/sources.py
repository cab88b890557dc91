"""Mechanisms that attend to a source: a sound one, one with a further state of its own, and a broken one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attn_core import (
    Capability,
    Cost,
    Field,
    Fields,
    LayerState,
    MechanismConfig,
    RaggedBatch,
    Shape,
    Slot,
    Source,
    StateSpecs,
    Step,
)
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from broken.sound import Sound, SoundLayer


class CrossLayer(SoundLayer):
    """Attention to a source."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Outputs [batch, query, width] over sources [batch, key, width]."""
        weights = self._weights(query, source, key_padding_mask)
        return self._project(weights, self._split(self.value(source), self.heads.key_value))

    def encode(self, source: Tensor) -> Mapping[str, Fields]:
        """Keys and values [source, heads, size] of one source [source, width]."""
        return {"source": {"key": self._rows(self.key(source)), "value": self._rows(self.value(source))}}

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Outputs [tokens, width] for the new tokens of many requests, computed request by request."""
        out = []
        for span in batch.spans():
            held = state["source"].rows([span.request])
            key, value = held.fields["key"].transpose(1, 2), held.fields["value"].transpose(1, 2)
            scores = self._scores(self._split(self.query(query[None, span.start : span.stop]), self.heads.query), key)
            out.append(self._project(torch.softmax(scores, -1), value)[0])
        return torch.cat(out)

    def _weights(self, query: Tensor, source: Tensor | None, key_padding_mask: Tensor | None) -> Tensor:
        if source is None:
            raise InvalidValue.of("source", None, "a tensor")
        queries, key = (
            self._split(self.query(query), self.heads.query),
            self._split(self.key(source), self.heads.key_value),
        )
        scores = self._scores(queries, key)
        allowed = scores.new_ones(scores.shape[-2:], dtype=torch.bool)[None, None]
        return self._share(
            scores, allowed if key_padding_mask is None else allowed & key_padding_mask[:, None, None, :]
        )


class Cross(Sound):
    """Attention to a source that keeps every law."""

    name = "sound_cross"
    capabilities = Sound.capabilities - {Capability.CAUSAL, Capability.BIDIRECTIONAL} | {Capability.CROSS}
    layer = CrossLayer

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values of every token of the source."""
        return {"source": Source(super().state(config)["kv"].fields)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projecting queries, outputs and the source's keys and values, and of two products per pair."""
        heads = config.head_layout
        own = 2 * 2 * config.hidden_size * heads.query * heads.key_size * shape.query
        memory = 2 * 2 * config.hidden_size * heads.key_value * heads.key_size * shape.encoded
        flops = shape.batch * (own + memory + 4 * heads.query * heads.key_size * shape.query * shape.source)
        whole = Shape(query=1, key=1)
        return Cost(flops=flops, allowed_flops=flops, parameters=super().cost(config, whole).parameters)


class RememberingLayer(CrossLayer):
    """Attention to a source, plus the projected mean of all inputs so far."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.mean = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Outputs [batch, query, width] over sources [batch, key, width]."""
        counts = torch.arange(1, query.shape[1] + 1, dtype=query.dtype, device=query.device)
        means = self.mean(query).cumsum(1) / counts[:, None]
        out: Tensor = means + super().forward(query, source, key_padding_mask=key_padding_mask)
        return out

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Outputs [tokens, width] for the new tokens of many requests, computed request by request."""
        sums, rows, out = list(state["mean"].read()["sum"]), self.mean(query), []
        for span in batch.spans():
            for position, row in enumerate(rows[span.start : span.stop], batch.contexts[span.request]):
                sums[span.request] = sums[span.request] + row
                out.append(sums[span.request] / (position + 1))
        state["mean"].write({"sum": torch.stack(sums)})
        return torch.stack(out) + super().step(query, batch, state)


class Remembering(Cross):
    """Attention to a source with a further state of its own sequence, which keeps every law."""

    name = "sound_remembering"
    layer = RememberingLayer

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The source's state, and the sum of all projected inputs."""
        return {**super().state(config), "mean": Slot({"sum": Field((config.hidden_size,))})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the attention and of one more projection."""
        flops = 2 * shape.batch * shape.query * config.hidden_size**2
        return super().cost(config, shape) + Cost(flops=flops, allowed_flops=flops, parameters=config.hidden_size**2)


class SeesUnrealLayer(RememberingLayer):
    """Spreads weight evenly over a source that is all padding."""

    def _share(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return torch.softmax(scores.masked_fill(~allowed, -1e300), -1)


class SeesUnreal(Remembering):
    """Breaks no allowed key: the content of a source that is all padding affects the output."""

    layer = SeesUnrealLayer
