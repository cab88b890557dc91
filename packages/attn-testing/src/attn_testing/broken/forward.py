"""Broken in what the full forward sees."""

from __future__ import annotations

import math

import torch
from attn_core import MechanismConfig
from torch import Tensor

from attn_testing.broken.sound import Sound, SoundLayer

FAR = 4


class LargeLeakLayer(SoundLayer):
    """Guards against overflow by the maximum of the whole sequence."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound rows, scaled down where any input of the sequence is large."""
        most = query.detach().abs().amax((1, 2), keepdim=True)
        scale = torch.clamp(most / 1000, min=1.0) if self.causal else 1.0
        return super().forward(query, source, key_padding_mask=key_padding_mask) / scale


class LargeLeak(Sound):
    """Breaks causality by perturbation: a later input shows, without a gradient, once it is large."""

    layer = LargeLeakLayer


class GradientLeakLayer(SoundLayer):
    """Adds a straight-through term that is zero."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound rows, with gradients from far ahead."""
        out = super().forward(query, source, key_padding_mask=key_padding_mask)
        if not self.causal or query.shape[1] <= FAR:
            return out
        ahead = torch.roll(query, -FAR, 1)
        return out + (ahead - ahead.detach())


class GradientLeak(Sound):
    """Breaks causality by gradient: gradients, and no values, come from four positions ahead."""

    layer = GradientLeakLayer


class NeverAheadLayer(SoundLayer):
    """Causal, whatever was asked for."""

    def __init__(self, config: MechanismConfig) -> None:
        super().__init__(config)
        self.causal = True


class NeverAhead(Sound):
    """Breaks bidirectionality: `causal=False` is taken and ignored."""

    layer = NeverAheadLayer


class UnnormalisedLayer(SoundLayer):
    """Shows the exponentials before they are normalised."""

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Exponentials [batch, heads, query, key]."""
        shares = super().weights(query, source, key_padding_mask=key_padding_mask)
        return shares * shares.shape[-1]


class Unnormalised(Sound):
    """Breaks row sums: the weights it shows are not those it uses."""

    layer = UnnormalisedLayer


class UniformWhenBlindLayer(SoundLayer):
    """Looks everywhere where it may look nowhere, as a large negative number in place of minus infinity does."""

    def _share(self, scores: Tensor, allowed: Tensor) -> Tensor:
        some = allowed.any(-1, keepdim=True)
        return torch.softmax(scores.masked_fill(~allowed & some, -math.inf), -1)


class UniformWhenBlind(Sound):
    """Breaks the law of no allowed key: such a query gets an average of all values."""

    layer = UniformWhenBlindLayer
