"""What the programs over e4m3 codes compute, in plain torch: roundings as they are, sums in float64.

On any device, for telling beforehand what rounding does to given queries, keys and values; it holds all scores of a
tile of keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_kernels_triton.fp8.codes import ROWS, width_of
from attn_kernels_triton.fp8.rotation import rotation
from attn_kernels_triton.kernels.fp8 import LARGEST, LIFTED


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Whether queries and keys are rotated, and how many rows share a scale: all of a tensor where it is None."""

    rotated: bool = True
    rows: int | None = ROWS


SHIPPED = Rounding()


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, rounding: Rounding = SHIPPED) -> Tensor:
    """The output [head, query, value_size], float64, of [head, row, size] under `seen` [query, key], bool.

    Every query must see a key. Logits are products over the root of the key size.
    """
    scale = query.shape[-1] ** -0.5 * math.log2(math.e)
    if rounding.rotated:
        turn = rotation(width_of(query.shape[-1]), torch.float64, query.device)
        query, key = (rotated(rows, turn) for rows in (query, key))
    query, key, value = (coded(rows, rounding.rows) for rows in (query, key, value))
    summed, total = torch.zeros_like(query[..., :1]), torch.zeros_like(query[..., :1])
    top = torch.full_like(total, -math.inf)
    for first in range(0, key.shape[-2], ROWS):
        here = slice(first, first + ROWS)
        powers = (query @ key[:, here].transpose(1, 2) * scale).masked_fill(~seen[:, here], -math.inf)
        highest = torch.maximum(top, powers.amax(-1, keepdim=True))
        base = highest.nan_to_num(neginf=0.0)
        shares, faded = torch.exp2(powers - base), torch.exp2(top - base)
        weights = nearest(shares * LIFTED.value) / LIFTED.value
        summed = summed * faded + weights @ value[:, here]
        total, top = total * faded + shares.sum(-1, keepdim=True), highest
    return summed / total


def rotated(rows: Tensor, turn: Tensor) -> Tensor:
    """Rows, filled up with zeros, times an orthogonal matrix, whose entries `turn` has up to the root of its size."""
    size = len(turn)
    filled = torch.nn.functional.pad(rows.double(), (0, size - rows.shape[-1]))
    return filled @ turn / math.sqrt(size)


def coded(rows: Tensor, together: int | None) -> Tensor:
    """The numbers that codes and scales stand for, float64; so many rows share a scale."""
    count = rows.shape[-2]
    several = count if together is None else together
    filled = torch.nn.functional.pad(rows.double(), (0, 0, 0, -count % several))
    filled = filled.view(*filled.shape[:-2], -1, several, filled.shape[-1])
    axes = tuple(range(filled.dim())) if together is None else (-2, -1)
    highest = filled.abs().amax(axes, keepdim=True)
    scale = torch.where(highest == 0, 1.0, highest / LARGEST.value)
    return (nearest(filled / scale) * scale).flatten(-3, -2)[..., :count, :]


def nearest(numbers: Tensor) -> Tensor:
    """The nearest numbers that e4m3 has, float64."""
    return numbers.clamp(-LARGEST.value, LARGEST.value).float().to(torch.float8_e4m3fn).double()
