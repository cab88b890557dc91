"""One key and one value for a whole block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class Compression(nn.Module):
    """φ: blocks of `length` rows of `size`, one every `stride` rows, to one row each: W₂ relu(W₁ [r₁ + p₁; ...]).

    Learned: `places` [length, size], zero at first, and `mix` and `output` (`nn.Linear` without bias); the same for
    all heads.
    """

    def __init__(self, size: int, *, length: int, stride: int) -> None:
        super().__init__()
        self.length = length
        self.stride = stride
        self.places = nn.Parameter(torch.zeros(length, size))
        self.mix = nn.Linear(length * size, size, bias=False)
        self.output = nn.Linear(size, size, bias=False)

    def forward(self, rows: Tensor, key_padding_mask: Tensor) -> Tensor:
        """[batch, block, heads, size] of rows [batch, key, heads, size], in their type; padding counts as zeros."""
        blocks = windows(rows, self.length, self.stride) + self.places[:, None]
        blocks = blocks * windows(key_padding_mask, self.length, self.stride)[..., None, None]
        out: Tensor = self.output(torch.relu(self.mix(blocks.transpose(2, 3).flatten(3))))
        return out


def windows(rows: Tensor, length: int, stride: int) -> Tensor:
    """[batch, block, length, ...] of rows [batch, key, ...]: one every `stride` rows, zeros behind the last row."""
    blocks = (rows.shape[1] + stride - 1) // stride
    missing = (blocks - 1) * stride + length - rows.shape[1]
    # A stride longer than a block would leave rows out; the options forbid it.
    filled = pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing))
    return filled.unfold(1, length, stride).movedim(-1, 2)
