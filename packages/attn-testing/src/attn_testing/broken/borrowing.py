"""Attention over what another layer made, sound and broken."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from attn_core import Capability, Cost, Fields, LayerState, MechanismConfig, RaggedBatch, Shape, StateSpecs
from torch import Tensor, nn

from attn_testing.broken.sound import Sound, SoundLayer


class BorrowerLayer(SoundLayer):
    """The sound layer, which lends its keys and values, and may have none of its own."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.borrows = config.borrows
        if self.borrows:
            del self.key, self.value

    def lend(self, query: Tensor) -> Fields:
        """Keys and values [batch, key, heads, size]."""
        return {"key": self._rows(self.key(query)), "value": self._rows(self.value(query))}

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        borrowed: Fields | None = None,
    ) -> Tensor:
        """Rows [batch, query, width] over whole sequences."""
        if borrowed is None:
            return super().forward(query, source, key_padding_mask=key_padding_mask)
        return self._project(
            self.weights(query, key_padding_mask=key_padding_mask, borrowed=borrowed), borrowed["value"].transpose(1, 2)
        )

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        borrowed: Fields | None = None,
    ) -> Tensor:
        """Weights [batch, heads, query, key]."""
        if borrowed is None:
            return super().weights(query, source, key_padding_mask=key_padding_mask)
        scores = self._scores(self._split(self.query(query), self.heads.query), borrowed["key"].transpose(1, 2))
        places = torch.arange(query.shape[1], device=query.device)
        allowed = self._allowed(places[:, None], places[None, :])[None, None]
        return self._share(
            scores, allowed if key_padding_mask is None else allowed & key_padding_mask[:, None, None, :]
        )

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Rows [tokens, width] of the new tokens; a layer that borrows adds nothing to the state."""
        if not self.borrows:
            return super().step(query, batch, state)
        return self._over(query, batch, state)

    def _over(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        out = []
        for span in batch.spans():
            new = slice(span.start, span.stop)
            fields, key_places = self._read(state["kv"], span.request, batch.requests)
            out.append(self._one(query[new], batch.positions[new], fields, key_places))
        return torch.cat(out)


class Borrower(Sound):
    """Keeps every law, that of borrowing too."""

    layer: ClassVar[type[nn.Module]] = BorrowerLayer
    capabilities = Sound.capabilities | {Capability.BORROWS}

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values, if its own."""
        return {} if config.borrows else super().state(config)

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Without the projections of keys and values where these are borrowed."""
        whole = super().cost(config, shape)
        if not config.borrows:
            return whole
        heads = config.head_layout
        columns = 2 * heads.key_value * heads.key_size
        spared = 2 * shape.batch * shape.query * config.width * columns
        parameters = config.width * columns + (columns if config.bias else 0)
        return dataclasses.replace(
            whole,
            flops=whole.flops - spared,
            allowed_flops=whole.allowed_flops - spared,
            parameters=whole.parameters - parameters,
        )


class FirstRequestLayer(BorrowerLayer):
    """Reads what the first request remembers for all of them."""

    def _over(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        fields, key_places = self._read(state["kv"], 0, batch.requests)
        rows = [
            self._one(query[span.start : span.stop], batch.positions[span.start : span.stop], fields, key_places)
            for span in batch.spans()
        ]
        return torch.cat(rows)


class FirstRequest(Borrower):
    """Breaks borrowing: a request attends to what another one left with the layer that lends."""

    layer = FirstRequestLayer
