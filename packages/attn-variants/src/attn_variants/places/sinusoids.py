"""Sinusoids of positions, of queries and keys as they meet."""

from __future__ import annotations

from functools import lru_cache

import torch
from attn_core.rotary import sinusoidal
from torch import Tensor

SHORTEST_TABLE = 256


def sinusoidal_at(positions: Tensor, size: int, like: Tensor) -> Tensor:
    """PE [..., size] of positions [...] from 0, int64, in the type of `like`."""
    if torch.compiler.is_compiling() or positions.numel() == 0:
        return sinusoidal(positions, size).to(like.dtype)
    longest = max(SHORTEST_TABLE, 1 << int(positions.max()).bit_length())
    return _table(longest, size, like.dtype, positions.device)[positions]


@lru_cache(maxsize=32)
def _table(length: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A tensor made in inference mode could not take part in training later.
    with torch.inference_mode(mode=False), torch.no_grad():
        return sinusoidal(torch.arange(length, device=device), size).to(dtype)
