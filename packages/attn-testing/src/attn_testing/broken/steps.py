"""Broken in how it goes step by step."""

from __future__ import annotations

import math

from attn_core import Field, Fields, LayerState, MechanismConfig, Paged, RaggedBatch, StateSpecs
from attn_core.batch import PagedView
from torch import Tensor

from attn_testing.broken.sound import Sound, SoundLayer


class UnscaledStepLayer(SoundLayer):
    """Forgets the scale in its step."""

    def _one(self, query: Tensor, places: Tensor, fields: Fields, key_places: Tensor) -> Tensor:
        louder = {"key": fields["key"] * math.sqrt(self.heads.key_size), "value": fields["value"]}
        return super()._one(query, places, louder, key_places)


class UnscaledStep(Sound):
    """Breaks decode equals forward: the step is another function, if always the same."""

    layer = UnscaledStepLayer


class TopLeftLayer(SoundLayer):
    """Aligns the causal mask of a chunk with the first remembered key, not the last."""

    def _one(self, query: Tensor, places: Tensor, fields: Fields, key_places: Tensor) -> Tensor:
        if len(places) > 1:
            places = places - places[0]
        return super()._one(query, places, fields, key_places)


class TopLeft(Sound):
    """Breaks chunked prefill: a chunk behind others does not see them all."""

    layer = TopLeftLayer


class OrphanLayer(SoundLayer):
    """Lets a token of a tree see what stood there before and itself, but none of its ancestors."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """As `SoundLayer.step`."""
        self._ancestors = [max(0, len(batch.path(request)) - 1) for request in range(batch.requests)]
        return super().step(query, batch, state)

    def _read(self, view: PagedView, request: int, requests: int) -> tuple[Fields, Tensor]:
        fields, places = super()._read(view, request, requests)
        last = len(places) - 1
        seen = [*range(last - self._ancestors[request]), last]
        return {name: rows[:, seen] for name, rows in fields.items()}, places[seen]


class Orphan(Sound):
    """Breaks that a tree equals its paths: tokens do not see their ancestors in it."""

    layer = OrphanLayer


class OverstatedState(Sound):
    """Breaks state bytes: claims twice the values it remembers."""

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys, and values of twice their size."""
        heads = config.head_layout
        key, value = (heads.key_value, heads.key_size), (heads.key_value, 2 * heads.key_size)
        return {"kv": Paged({"key": Field(key), "value": Field(value)})}
