"""Rotary position embedding: each pair of elements is rotated by an angle proportional to the position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core import Rotary
from attn_core.batch import RowsInPlace
from attn_core.errors import InvalidValue
from attn_core.graph_safety import device_cache
from attn_core.kernels.rowwise import RotaryKernel, row_result
from torch import Tensor

from attn_variants.compute.constants import in_trace

SHORTEST_TABLE = 256


class CosSin(NamedTuple):
    """Cosines and signed sines [..., 1, rotated] of positions; the axis of size one broadcasts over heads."""

    cosines: Tensor
    sines: Tensor

    def at(self, places: Tensor | slice) -> CosSin:
        """Index the first axis."""
        return CosSin(self.cosines[places], self.sines[places])


def rotated_size(rotary: Rotary, size: int) -> int:
    """The number of elements of a head that are rotated; raises `InvalidValue` unless it is even, from 2 to `size`."""
    rotated = int(size * rotary.fraction)
    if rotated < 2 or rotated % 2 or rotated > size:
        given = f"{rotary.fraction} of head_size {size}"
        raise InvalidValue.of("rotary.fraction", given, "a fraction that gives an even number of elements")
    return rotated


def cos_sin_of(rotary: Rotary, rotated: int, positions: Tensor, dtype: torch.dtype) -> CosSin:
    """Cosines and sines of positions [...], in `dtype`; angles are computed in float64, exact for large positions.

    MPS has no float64: its angles are computed on the CPU.
    """
    device = positions.device
    exact = positions.cpu() if device.type == "mps" else positions
    angles = exact.to(torch.float64)[..., None] * frequencies_on(rotary, rotated, exact.device)
    cosines, sines = angles.cos(), angles.sin()
    if rotary.attention_factor != 1:
        cosines, sines = cosines * rotary.attention_factor, sines * rotary.attention_factor
    if rotary.interleaved:
        cosines = cosines.repeat_interleave(2, dim=-1)
        signed = torch.stack([-sines, sines], dim=-1).flatten(-2)
    else:
        cosines = torch.cat([cosines, cosines], dim=-1)
        signed = torch.cat([-sines, sines], dim=-1)
    return CosSin(cosines[..., None, :].to(device, dtype), signed[..., None, :].to(device, dtype))


def frequencies_on(rotary: Rotary, rotated: int, device: torch.device) -> Tensor:
    """The angle per position of each rotated pair, [rotated / 2], float64, cached for each device."""
    if in_trace():
        return torch.tensor(rotary.frequencies(rotated), device=device, dtype=torch.float64)
    return _frequencies(rotary, rotated, device)


@device_cache(64)
def _frequencies(rotary: Rotary, rotated: int, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False), torch.no_grad():
        return torch.tensor(rotary.frequencies(rotated), device=device, dtype=torch.float64)


def cos_sin_to(rotary: Rotary, rotated: int, length: int, like: Tensor) -> CosSin:
    """Cosines and sines of positions 0 to `length`, exclusive, on the device of `like`.

    They are float64 if `like` is, else float32.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if in_trace():
        return cos_sin_of(rotary, rotated, torch.arange(length, device=like.device), dtype)
    longest = max(SHORTEST_TABLE, 1 << (length - 1).bit_length())
    return _table(rotary, rotated, longest, dtype, like.device).at(slice(length))


@device_cache(32)
def _table(rotary: Rotary, rotated: int, length: int, dtype: torch.dtype, device: torch.device) -> CosSin:
    # A tensor made in inference mode could not take part in training later.
    with torch.inference_mode(mode=False), torch.no_grad():
        return cos_sin_of(rotary, rotated, torch.arange(length, device=device), dtype)


def rotate(rows: Tensor, cos_sin: CosSin, *, interleaved: bool) -> Tensor:
    """Rotate rows [..., tokens, heads, size] to their positions, in their dtype.

    Elements beyond the size of `cos_sin` are left unchanged.
    """
    if not torch.compiler.is_compiling() and turns(rows, cos_sin):
        form = PAIRS[interleaved]
        found: Tensor | None = row_result(
            RotaryKernel, form, lambda kernel: kernel.rotate(rows, *cos_sin, interleaved=interleaved), rows
        )
        if found is not None:
            return found
    rotated = cos_sin.cosines.shape[-1]
    turned = rows if rotated == rows.shape[-1] else rows[..., :rotated]
    partner = pair_swapped(turned) if interleaved else half_swapped(turned)
    out = torch.addcmul(turned * cos_sin.cosines, partner, cos_sin.sines).to(rows.dtype)
    return out if rotated == rows.shape[-1] else torch.cat([out, rows[..., rotated:]], dim=-1)


def rotate_appended(
    projected: tuple[Tensor, Tensor, Tensor], cos_sin: CosSin, kept: RowsInPlace, *, interleaved: bool
) -> Tensor | None:
    """Rotate queries and keys, and write keys and values to the cache, in one kernel call; None if no kernel can.

    `projected` are unrotated queries, keys and values [tokens, heads, size]; `kept` are the rows of the cache, with the
    fields "key" and "value", in the same dtype. Returns the rotated queries.
    """
    query = projected[0]
    if any(kept.fields[name].dtype != query.dtype for name in ("key", "value")):
        return None
    if not turns(query, cos_sin):
        return None

    def appended(kernel: RotaryKernel) -> Tensor | None:
        return kernel.rotate_appended(projected, cos_sin, kept, interleaved=interleaved)

    return row_result(RotaryKernel, PAIRS[interleaved], appended, query)


PAIRS = {False: "halves", True: "pairs"}
"""The forms of rotary kernels by `interleaved`: element i is paired with its half's counterpart or its neighbour."""


def turns(rows: Tensor, cos_sin: CosSin) -> bool:
    """Whether the rotary kernels support the shapes and dtypes of rows and angles."""
    if cos_sin.cosines.dtype != torch.float32 or rows.dim() not in (3, 4):
        return False
    tokens, batch = rows.shape[-3], rows.shape[:-3]
    return cos_sin.cosines.shape[:-1] in {(tokens, 1), (1, tokens, 1), (*batch, tokens, 1)}


def half_swapped(rows: Tensor) -> Tensor:
    """Exchange the first and the second half of rows [..., size]."""
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1)


def pair_swapped(rows: Tensor) -> Tensor:
    """Exchange elements 0 and 1, 2 and 3, ... of rows [..., size]."""
    pairs = rows.reshape(*rows.shape[:-1], rows.shape[-1] // 2, 2)
    return pairs.flip(-1).flatten(-2)
