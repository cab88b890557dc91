"""Fixed positions: sines and cosines of falling frequency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

BASE = 10000.0


def sinusoidal(positions: Tensor, width: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/width)), PE(p, 2i+1) = cos of the same: float64 [..., width] of integers [...].

    Of an odd width the last element is a sine without its cosine. Angles are taken in float64, so that far positions
    stay right (Vaswani et al. 2017, section 3.5). Only methods of tensors are used.
    """
    places = positions.double()[..., None]
    angles = places * places.new_tensor([BASE ** (-2 * pair / width) for pair in range((width + 1) // 2)])
    waves = angles.new_empty(*positions.shape, width)
    waves[..., 0::2] = angles.sin()
    waves[..., 1::2] = angles[..., : width // 2].cos()
    return waves
