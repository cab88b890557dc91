"""Dropping weights, sound and broken."""

from __future__ import annotations

from typing import ClassVar

from attn_core import MechanismConfig
from torch import Tensor, nn
from torch.nn.functional import dropout

from attn_testing.broken.sound import Sound, SoundLayer


class DropperLayer(SoundLayer):
    """The sound layer, which drops weights of whole sequences in training."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.probability = config.dropout

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Rows [batch, query, width] over whole sequences."""
        weights = self._dropped(self._weights(query, source, key_padding_mask))
        return self._project(weights, self._split(self.value(query), self.heads.key_value))

    def _dropped(self, weights: Tensor) -> Tensor:
        return dropout(weights, self.probability, self.training)


class Dropper(Sound):
    """Keeps every law, that of dropped weights too."""

    drops_weights = True
    layer: ClassVar[type[nn.Module]] = DropperLayer


class AlwaysDropsLayer(DropperLayer):
    """Drops in evaluation, too."""

    def _dropped(self, weights: Tensor) -> Tensor:
        return dropout(weights, self.probability, training=True)


class AlwaysDrops(Dropper):
    """Breaks dropped weights: whoever asks a trained model twice gets two answers."""

    layer = AlwaysDropsLayer
