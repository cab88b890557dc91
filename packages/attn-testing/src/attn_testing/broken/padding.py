"""Broken in how padded keys are treated."""

from __future__ import annotations

from attn_core import Capability, Fields, LayerState, RaggedBatch
from attn_core.batch import PagedView
from torch import Tensor

from attn_testing.broken.sound import Sound, SoundLayer


class LateMaskLayer(SoundLayer):
    """Masks padding after the softmax, so that padded keys still take their share."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Rows whose weights do not sum to one where there is padding."""
        weights = self._weights(query, source, None)
        weights = weights if key_padding_mask is None else weights * key_padding_mask[:, None, None, :]
        return self._project(weights, self._split(self.value(query), self.heads.key_value))

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Not shown."""
        raise NotImplementedError("this layer shows no weights")


class LateMask(Sound):
    """Breaks padding invariance: padded keys enter the denominator."""

    layer = LateMaskLayer
    capabilities = Sound.capabilities - {Capability.WEIGHTS, Capability.NORMALISED}


class IgnoredMaskLayer(SoundLayer):
    """Takes a mask of padded keys and does not use it."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound rows as if there were no padding."""
        return super().forward(query, source)


class IgnoredMask(Sound):
    """Breaks the law of the undeclared: without PADDING, a mask must be refused."""

    layer = IgnoredMaskLayer
    capabilities = Sound.capabilities - {Capability.PADDING}


class RubbishLayer(SoundLayer):
    """Reads the rows of all requests, but not those of a tree, together and forgets which of them are padding."""

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """As `SoundLayer.step`."""
        self._in_tree = bool(batch.paths)
        return super().step(query, batch, state)

    def _read(self, view: PagedView, request: int, requests: int) -> tuple[Fields, Tensor]:
        if self._in_tree:
            return super()._read(view, request, requests)
        held = view.rows(range(requests))
        return {name: rows[request : request + 1] for name, rows in held.fields.items()}, held.positions[request]


class Rubbish(Sound):
    """Breaks batch invariance: beside a longer request, padding is attended to."""

    layer = RubbishLayer
