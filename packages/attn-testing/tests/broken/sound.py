"""Mechanisms that keep every law, from which broken ones are derived: plain, with dropout, with shared KV."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, cast

import torch
from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    Fields,
    LayerState,
    MechanismConfig,
    Paged,
    Paper,
    RaggedBatch,
    Shape,
    StateSpecs,
    Step,
)
from attn_core.batch import PagedView
from attn_core.errors import InvalidValue
from torch import Tensor, nn
from torch.nn.functional import dropout

VASWANI = Paper(title="Attention is all you need", authors="Vaswani et al.", year=2017, arxiv="1706.03762")


class SoundLayer(nn.Module):
    """A plain implementation of scaled dot-product attention with grouped heads."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__()
        heads = config.head_layout
        self.heads, self.causal = heads, config.causal
        self.query = nn.Linear(config.hidden_size, heads.query * heads.key_size, config.bias)
        self.key = nn.Linear(config.hidden_size, heads.key_value * heads.key_size, config.bias)
        self.value = nn.Linear(config.hidden_size, heads.key_value * heads.value_size, config.bias)
        self.output = nn.Linear(heads.query * heads.value_size, config.hidden_size, config.bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Outputs [batch, query, width] for whole sequences."""
        weights = self._weights(query, source, key_padding_mask)
        value = self._split(self.value(query), self.heads.key_value)
        return self._project(weights, value)

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]."""
        return self._weights(query, source, key_padding_mask)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Outputs [tokens, width] for the new tokens of many requests, computed request by request."""
        state["kv"].append({"key": self._rows(self.key(query)), "value": self._rows(self.value(query))})
        out = []
        for span in batch.spans():
            new = slice(span.start, span.stop)
            fields, key_places = self._read(state["kv"], span.request, batch.requests)
            out.append(self._one(query[new], batch.positions[new], fields, key_places))
        return torch.cat(out)

    def _read(self, view: PagedView, request: int, requests: int) -> tuple[Fields, Tensor]:
        """The cached fields of one of the `requests` requests, [1, rows, ...] each, and their positions [rows]."""
        held = view.rows([request])
        return held.fields, held.positions[0]

    def _one(self, query: Tensor, places: Tensor, fields: Fields, key_places: Tensor) -> Tensor:
        key, value = fields["key"].transpose(1, 2), fields["value"].transpose(1, 2)
        scores = self._scores(self._split(self.query(query[None]), self.heads.query), key)
        allowed = self._allowed(places[:, None], key_places[None, :])
        return self._project(self._share(scores, allowed[None, None]), value)[0]

    def _weights(self, query: Tensor, source: Tensor | None, key_padding_mask: Tensor | None) -> Tensor:
        if source is not None:
            raise InvalidValue.of("source", "a tensor", "None for self-attention")
        key = self._split(self.key(query), self.heads.key_value)
        scores = self._scores(self._split(self.query(query), self.heads.query), key)
        places = torch.arange(query.shape[1], device=query.device)
        allowed = self._allowed(places[:, None], places[None, :])[None, None]
        return self._share(
            scores, allowed if key_padding_mask is None else allowed & key_padding_mask[:, None, None, :]
        )

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ self._spread(key).transpose(-1, -2) / math.sqrt(self.heads.key_size)

    def _allowed(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query if self.causal else (key >= 0) & (query >= 0)

    def _share(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Softmax over the allowed keys; zeros with zero gradients if there is none."""
        scores = scores.masked_fill(~allowed, -math.inf)
        some = allowed.any(-1, keepdim=True)
        return torch.softmax(scores.masked_fill(~some, 0.0), -1) * some

    def _project(self, weights: Tensor, value: Tensor) -> Tensor:
        out: Tensor = self.output((weights @ self._spread(value)).transpose(1, 2).flatten(2))
        return out

    def _spread(self, rows: Tensor) -> Tensor:
        return rows.repeat_interleave(self.heads.query // self.heads.key_value, 1)

    def _split(self, rows: Tensor, heads: int) -> Tensor:
        return torch.unflatten(rows, -1, (heads, -1)).transpose(1, 2)

    def _rows(self, rows: Tensor) -> Tensor:
        return torch.unflatten(rows, -1, (self.heads.key_value, -1))


class Sound(ComputedMechanism):
    """Multi-head attention that keeps every law. Subclasses replace `layer` to break one."""

    name = "sound"
    summary = "Scaled dot-product attention, written out."
    paper = VASWANI
    equation = r"\mathrm{softmax}(q^\top k / \sqrt{d_k}) V"
    capabilities = frozenset(Capability) - {
        Capability.CHOOSES,
        Capability.CROSS,
        Capability.ROTARY,
        Capability.SHARES_KV,
    }
    layer: ClassVar[type[nn.Module]] = SoundLayer

    def build(self, config: MechanismConfig) -> nn.Module:
        """Build a new layer."""
        if config.rotary is not None:
            raise InvalidValue.of("rotary", config.rotary, "None")
        return self.layer(config)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values of every token."""
        heads = config.head_layout
        size = (heads.key_value, heads.key_size)
        return {"kv": Paged({"key": Field(size), "value": Field(size)})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of four projections and of two products per pair of a query and a key."""
        heads = config.head_layout
        columns = 2 * (heads.query + heads.key_value) * heads.key_size
        biases = (columns - heads.query * heads.key_size + config.hidden_size) if config.bias else 0
        tokens = shape.batch * shape.query * 2 * config.hidden_size * columns
        pair = 4 * heads.query * heads.key_size
        pairs = shape.query * shape.key
        seen = shape.query * shape.remembered + shape.query * (shape.query + 1) // 2
        return Cost(
            flops=tokens + shape.batch * pairs * pair,
            allowed_flops=tokens + shape.batch * (seen if config.causal else pairs) * pair,
            parameters=config.hidden_size * columns + biases,
        )


class Splitter(Sound):
    """Keeps every law, including that of split heads."""

    splits_heads = True


class HeadsMeetLayer(SoundLayer):
    """Subtracts the mean over all heads from each head."""

    def _project(self, weights: Tensor, value: Tensor) -> Tensor:
        out = weights @ self._spread(value)
        return cast("Tensor", self.output((out - out.mean(1, keepdim=True)).transpose(1, 2).flatten(2)))


class HeadsMeet(Splitter):
    """Breaks head split: the output of a head depends on the other heads."""

    layer: ClassVar[type[nn.Module]] = HeadsMeetLayer


class DropperLayer(SoundLayer):
    """The sound layer with dropout of attention weights in `forward` in training."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.probability = config.dropout

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Outputs [batch, query, width] for whole sequences."""
        weights = self._dropped(self._weights(query, source, key_padding_mask))
        return self._project(weights, self._split(self.value(query), self.heads.key_value))

    def _dropped(self, weights: Tensor) -> Tensor:
        return dropout(weights, self.probability, self.training)


class Dropper(Sound):
    """Keeps every law, including that of dropped weights."""

    drops_weights = True
    layer: ClassVar[type[nn.Module]] = DropperLayer


class AlwaysDropsLayer(DropperLayer):
    """Applies dropout in evaluation, too."""

    def _dropped(self, weights: Tensor) -> Tensor:
        return dropout(weights, self.probability, training=True)


class AlwaysDrops(Dropper):
    """Breaks dropped weights: evaluation is not deterministic."""

    layer = AlwaysDropsLayer


class SharedKvLayer(SoundLayer):
    """The sound layer, which can share its keys and values or, with `shares_kv`, use those of another layer."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.shares_kv = config.shares_kv
        if self.shares_kv:
            del self.key, self.value

    def project_kv(self, query: Tensor) -> Fields:
        """Keys and values [batch, key, heads, size]."""
        return {"key": self._rows(self.key(query)), "value": self._rows(self.value(query))}

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
    ) -> Tensor:
        """Outputs [batch, query, width] for whole sequences."""
        if shared_kv is None:
            return super().forward(query, source, key_padding_mask=key_padding_mask)
        return self._project(
            self.weights(query, key_padding_mask=key_padding_mask, shared_kv=shared_kv),
            shared_kv["value"].transpose(1, 2),
        )

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]."""
        if shared_kv is None:
            return super().weights(query, source, key_padding_mask=key_padding_mask)
        scores = self._scores(self._split(self.query(query), self.heads.query), shared_kv["key"].transpose(1, 2))
        places = torch.arange(query.shape[1], device=query.device)
        allowed = self._allowed(places[:, None], places[None, :])[None, None]
        return self._share(
            scores, allowed if key_padding_mask is None else allowed & key_padding_mask[:, None, None, :]
        )

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Outputs [tokens, width] for the new tokens; a layer with shares_kv adds nothing to the state."""
        if not self.shares_kv:
            return super().step(query, batch, state)
        return self._over(query, batch, state)

    def _over(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        out = []
        for span in batch.spans():
            new = slice(span.start, span.stop)
            fields, key_places = self._read(state["kv"], span.request, batch.requests)
            out.append(self._one(query[new], batch.positions[new], fields, key_places))
        return torch.cat(out)


class SharedKvMechanism(Sound):
    """Keeps every law, including that of shared keys and values."""

    layer: ClassVar[type[nn.Module]] = SharedKvLayer
    capabilities = Sound.capabilities | {Capability.SHARES_KV}

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values of every token; nothing with shares_kv."""
        return {} if config.shares_kv else super().state(config)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost, without the projections of keys and values if shares_kv is set."""
        whole = super().cost(config, shape)
        if not config.shares_kv:
            return whole
        heads = config.head_layout
        columns = 2 * heads.key_value * heads.key_size
        spared = 2 * shape.batch * shape.query * config.hidden_size * columns
        parameters = config.hidden_size * columns + (columns if config.bias else 0)
        return dataclasses.replace(
            whole,
            flops=whole.flops - spared,
            allowed_flops=whole.allowed_flops - spared,
            parameters=whole.parameters - parameters,
        )


class FirstRequestLayer(SharedKvLayer):
    """Reads the states of the first request for all requests."""

    def _over(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        fields, key_places = self._read(state["kv"], 0, batch.requests)
        rows = [
            self._one(query[span.start : span.stop], batch.positions[span.start : span.stop], fields, key_places)
            for span in batch.spans()
        ]
        return torch.cat(rows)


class FirstRequest(SharedKvMechanism):
    """Breaks KV sharing: requests attend to the keys and values of another request."""

    layer = FirstRequestLayer
