"""Random directions for features of kernels."""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def independent(features: int, size: int, generator: Generator | None = None) -> Tensor:
    """Gaussian directions [features, size], float32, N(0, 1)."""
    return torch.randn(features, size, generator=generator)


def orthogonal(features: int, size: int, generator: Generator | None = None) -> Tensor:
    """Directions [features, size], float32, each distributed as N(0, I) and orthogonal within blocks of `size`.

    Directions of a random orthogonal matrix, with the lengths of independent Gaussian ones (Choromanski et al. 2021,
    arXiv 2009.14794, §3.2 and appendix B); the last block is cut where `size` does not divide `features`.
    """
    blocks = -(-features // size)
    gaussian = torch.randn(blocks, size, size, generator=generator)
    unit, upper = torch.linalg.qr(gaussian)
    # Signs make the directions uniform: QR alone prefers those with a positive first product.
    unit = unit * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    lengths = independent(features, size, generator).norm(dim=-1, keepdim=True)
    directions: Tensor = unit.transpose(-1, -2).reshape(-1, size)[:features] * lengths
    return directions
