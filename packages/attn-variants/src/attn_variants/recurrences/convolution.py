"""The short causal convolution that several recurrences put before their memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class ShortConvolution(nn.Module):
    """Each channel is the SiLU of a weighted sum of its last `taps` values.

    Learned: `weight` [channels, taps], the newest token last, uniform in ±1/√taps as torch's convolutions.
    """

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(channels, taps).uniform_(-(taps**-0.5), taps**-0.5))

    def forward(self, rows: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows [batch, tokens, channels] convolved, and the last taps - 1 rows, [batch, taps - 1, channels].

        `tail` are those before the first row; None is zeros, the start of a sequence.
        """
        batch, tokens, channels = rows.shape
        if tail is None:
            tail = rows.new_zeros(batch, self.taps - 1, channels)
        known = torch.cat([tail.to(rows.dtype), rows], dim=1)
        weight = self.weight.to(rows.dtype)
        summed = known[:, :tokens] * weight[:, 0]
        for tap in range(1, self.taps):
            summed = torch.addcmul(summed, known[:, tap : tap + tokens], weight[:, tap])
        return silu(summed), known[:, tokens:]
