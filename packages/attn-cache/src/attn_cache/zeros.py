"""Large zero tensors whose memory the system provides when it is first touched."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

SMALL = 1 << 20
"""Bytes below which a plain tensor is as good."""


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of this shape.

    On a CPU `torch.zeros` writes every page at once, so that room set aside for the longest sequences would be taken
    whether or not any comes; anonymous memory of the system is zero without being written.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < SMALL or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
