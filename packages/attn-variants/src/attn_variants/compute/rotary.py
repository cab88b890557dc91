"""Rotary positions: each pair of elements turned by an angle that grows with the position."""

from __future__ import annotations

from functools import lru_cache

import torch
from attn_core import Rotary
from attn_core.errors import InvalidValue
from torch import Tensor

SHORTEST_TABLE = 256


def rotated_size(rotary: Rotary, size: int) -> int:
    """How many elements of a head are rotated; raises `InvalidValue` where these are no pairs."""
    rotated = int(size * rotary.fraction)
    if rotated < 2 or rotated % 2 or rotated > size:
        given = f"{rotary.fraction} of head_size {size}"
        raise InvalidValue.of("rotary.fraction", given, "a share of the head that is an even number of elements")
    return rotated


def turns(rotary: Rotary, rotated: int, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines [..., 2, rotated] of positions [...]; `rotate` says how they are laid out.

    Angles are taken in float64, so they stay right at long positions; the result is of type `dtype`.
    """
    half = rotated // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float64) * (-2.0 / rotated)
    angles = positions.to(torch.float64)[..., None] * torch.pow(rotary.base, exponents)
    cosines, sines = angles.cos(), angles.sin()
    if rotary.interleaved:
        cosines = cosines.repeat_interleave(2, dim=-1)
        signed = torch.stack([-sines, sines], dim=-1).flatten(-2)
    else:
        cosines = torch.cat([cosines, cosines], dim=-1)
        signed = torch.cat([-sines, sines], dim=-1)
    return torch.stack([cosines, signed], dim=-2).to(dtype)


def turns_to(rotary: Rotary, rotated: int, length: int, like: Tensor) -> Tensor:
    """The turns [length, 2, rotated] of positions 0 to `length`, for the type and device of `like`."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if torch.compiler.is_compiling():
        return turns(rotary, rotated, torch.arange(length, device=like.device), dtype)
    longest = max(SHORTEST_TABLE, 1 << (length - 1).bit_length())
    return _table(rotary, rotated, longest, dtype, like.device)[:length]


@lru_cache(maxsize=32)
def _table(rotary: Rotary, rotated: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A tensor made in inference mode could not take part in training later.
    with torch.inference_mode(mode=False), torch.no_grad():
        return turns(rotary, rotated, torch.arange(length, device=device), dtype)


def rotate(rows: Tensor, turn: Tensor, *, interleaved: bool) -> Tensor:
    """Rows [..., tokens, heads, size] turned by `turn` [..., tokens, 2, rotated], in the rows' type.

    Elements past `rotated` are left as they are.
    """
    rotated = turn.shape[-1]
    turned = rows if rotated == rows.shape[-1] else rows[..., :rotated]
    cosines, sines = turn[..., :1, :], turn[..., 1:, :]
    partner = pair_swapped(turned) if interleaved else turned.roll(rotated // 2, -1)
    out = torch.addcmul(turned * cosines, partner, sines).to(rows.dtype)
    return out if rotated == rows.shape[-1] else torch.cat([out, rows[..., rotated:]], dim=-1)


def pair_swapped(rows: Tensor) -> Tensor:
    """Rows [..., size] with elements 0 and 1, 2 and 3, ... exchanged."""
    pairs = rows.reshape(*rows.shape[:-1], rows.shape[-1] // 2, 2)
    return pairs.flip(-1).flatten(-2)
