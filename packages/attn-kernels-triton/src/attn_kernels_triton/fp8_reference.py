"""A reference of the FP8 attention kernels in plain PyTorch: the same rounding, with sums in float64.

It runs on any device and measures the effect of rounding on given queries, keys and values. It materializes the scores
of all queries for one tile of keys at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_kernels_triton.fp8 import ROWS, rotation, width_of
from attn_kernels_triton.kernels.fp8 import LARGEST, LIFTED


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Whether queries and keys are rotated, and how many rows share a scale (None: all rows of a tensor)."""

    rotated: bool = True
    rows: int | None = ROWS


SHIPPED = Rounding()


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, rounding: Rounding = SHIPPED) -> Tensor:
    """The output [head, query, value_size], float64, for inputs [head, row, size] and a mask `seen` [query, key], bool.

    Every query must see at least one key. Logits are products divided by the square root of the key size.
    """
    scale = query.shape[-1] ** -0.5 * math.log2(math.e)
    if rounding.rotated:
        matrix = rotation(width_of(query.shape[-1]), torch.float64, query.device)
        query, key = (rotated(rows, matrix) for rows in (query, key))
    query, key, value = (coded(rows, rounding.rows) for rows in (query, key, value))
    summed, total = torch.zeros_like(query[..., :1]), torch.zeros_like(query[..., :1])
    top = torch.full_like(total, -math.inf)
    for first in range(0, key.shape[-2], ROWS):
        here = slice(first, first + ROWS)
        powers = (query @ key[:, here].transpose(1, 2) * scale).masked_fill(~seen[:, here], -math.inf)
        highest = torch.maximum(top, powers.amax(-1, keepdim=True))
        base = highest.nan_to_num(neginf=0.0)
        unnormalized, rescale = torch.exp2(powers - base), torch.exp2(top - base)
        weights = nearest(unnormalized * LIFTED.value) / LIFTED.value
        summed = summed * rescale + weights @ value[:, here]
        total, top = total * rescale + unnormalized.sum(-1, keepdim=True), highest
    return summed / total


def rotated(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows, padded with zeros, times the orthogonal matrix `matrix` / sqrt(size)."""
    size = len(matrix)
    filled = torch.nn.functional.pad(rows.double(), (0, size - rows.shape[-1]))
    return filled @ matrix / math.sqrt(size)


def coded(rows: Tensor, together: int | None) -> Tensor:
    """Quantize and dequantize rows, float64, with one scale for each `together` rows (None: for all of the tensor)."""
    count = rows.shape[-2]
    several = count if together is None else together
    filled = torch.nn.functional.pad(rows.double(), (0, 0, 0, -count % several))
    filled = filled.view(*filled.shape[:-2], -1, several, filled.shape[-1])
    axes = tuple(range(filled.dim())) if together is None else (-2, -1)
    highest = filled.abs().amax(axes, keepdim=True)
    scale = torch.where(highest == 0, 1.0, highest / LARGEST.value)
    return (nearest(filled / scale) * scale).flatten(-3, -2)[..., :count, :]


def nearest(numbers: Tensor) -> Tensor:
    """The numbers rounded to e4m3, float64."""
    return numbers.clamp(-LARGEST.value, LARGEST.value).float().to(torch.float8_e4m3fn).double()
