"""Fixed positions: sines and cosines of falling frequency."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10000.0


def sinusoidal(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/width)), PE(p, 2i+1) = cos of the same, [..., width] for positions [...].

    Of an odd width the last element is a sine without its cosine. Angles are taken in float64, so that far positions
    stay right (Vaswani et al. 2017, section 3.5).
    """
    pairs = torch.arange((width + 1) // 2, device=positions.device, dtype=torch.float64)
    angles = positions.to(torch.float64)[..., None] * torch.pow(BASE, -2 * pairs / width)
    waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
    return waves[..., :width].to(dtype)
