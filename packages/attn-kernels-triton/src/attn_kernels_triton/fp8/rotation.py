"""Hadamard rotations with random signs: what is large in one channel becomes small in all of them.

Products of two rows that are both rotated are what they were, times the size: "incoherent processing" (Chee et al.
2023, arXiv 2307.13304; Shah et al. 2024, arXiv 2407.08608, section 3.3).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

SEED = 20240711


@lru_cache(maxsize=32)
def rotation(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Signs times a Hadamard matrix [width, width] of ones and minus ones, the same each time; a power of two wide.

    It is not divided by the root of the width, so that every type holds it exactly.
    """
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    matrix = torch.ones(1, 1, dtype=torch.int64)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (signs * matrix).to(device=device, dtype=dtype)
