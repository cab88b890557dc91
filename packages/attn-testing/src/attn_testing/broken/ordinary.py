"""Mechanisms that break one law of ordinary use each."""

from __future__ import annotations

from torch import Tensor

from attn_testing.broken.sound import Sound, SoundLayer


class KeepsGraphLayer(SoundLayer):
    """Keeps a loss of the last training pass, with its graph."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs."""
        out = super().forward(query, source, key_padding_mask=key_padding_mask)
        if self.training:
            self.loss = out.square().mean()
        return out


class KeepsGraph(Sound):
    """Breaks copied: tensors inside a graph cannot be copied."""

    layer = KeepsGraphLayer
