"""Codes of 2, 4 or 8 bits, side by side in bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., size], uint8, below 2^bits, as bytes [..., ceil(size bits / 8)]; the first in the lowest bits."""
    each = 8 // bits
    if each == 1:
        return codes
    missing = -codes.shape[-1] % each
    whole = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    shares = whole.reshape(*whole.shape[:-1], -1, each)
    packed: Tensor = shares[..., 0].clone()
    for place in range(1, each):
        packed |= shares[..., place] << (place * bits)
    return packed


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """The codes [..., size], uint8, of these bytes."""
    each = 8 // bits
    if each == 1:
        return packed
    mask = 2**bits - 1
    shares = [(packed >> (place * bits)) & mask for place in range(each)]
    return torch.stack(shares, -1).flatten(-2)[..., :size]
