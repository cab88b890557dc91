"""Broken in arithmetic: gradients, element types, hidden weights."""

from __future__ import annotations

from typing import Any

import torch
from attn_core import MechanismConfig
from torch import Tensor

from attn_testing.broken.sound import Sound, SoundLayer


class Louder(torch.autograd.Function):
    """The identity, with a gradient of 1.5."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        """The rows."""
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Too much."""
        return gradients[0] * 1.5


class WrongBackwardLayer(SoundLayer):
    """Has a backward of its own, which is wrong."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound rows."""
        louder: Tensor = Louder.apply(query)  # type: ignore[no-untyped-call]
        return super().forward(louder, source, key_padding_mask=key_padding_mask)


class WrongBackward(Sound):
    """Breaks gradients: they are not those of the function."""

    layer = WrongBackwardLayer


class WidensLayer(SoundLayer):
    """Computes in float32 where it was given 16 bits, and stays there."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound rows, in at least float32."""
        out = super().forward(query, source, key_padding_mask=key_padding_mask)
        return out.float() if out.element_size() == 2 else out


class Widens(Sound):
    """Breaks precision: the answer is not in the type of the question."""

    layer = WidensLayer


class HiddenWeightLayer(SoundLayer):
    """Draws a number that its state dict does not have."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.temperature = 1.0 + torch.rand(()).item()

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        return super()._scores(query, key) / self.temperature


class HiddenWeight(Sound):
    """Breaks saved and loaded: what was drawn at random is lost."""

    layer = HiddenWeightLayer


class LooksInsideLayer(SoundLayer):
    """Asks for the value of a tensor, which no graph can hold."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound rows."""
        if query.detach().abs().max().item() > 1e30:
            query = query / 2
        return super().forward(query, source, key_padding_mask=key_padding_mask)


class LooksInside(Sound):
    """Breaks compiles: the graph breaks where a value is looked at."""

    layer = LooksInsideLayer
