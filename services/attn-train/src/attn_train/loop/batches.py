"""Training batches: windows of one long text at random places."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from torch import Tensor


class Batches:
    """Draws `batch` windows of `context` tokens with their next tokens, at places given by a seeded generator.

    `tokens` is [tokens], any integer type. Raises `InvalidValue` if not even one window fits.
    """

    def __init__(self, tokens: Tensor, *, context: int, batch: int, seed: int) -> None:
        if len(tokens) <= context:
            allowed = f"more than the context of {context} tokens"
            raise InvalidValue.of("data", f"{len(tokens)} tokens", allowed)
        # A view: window i is tokens i to i + context, so one gather makes a batch and its targets.
        self._windows = tokens.unfold(0, context + 1, 1)
        self._batch = batch
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64, [batch, context] each; targets are one token ahead."""
        places = torch.randint(len(self._windows), (self._batch,), generator=self.generator)
        rows = self._windows[places].long()
        return rows[:, :-1], rows[:, 1:]
