"""Rounding of tensors to integer codes, and packing of codes into bytes.

Scales are rounded to float16 first and codes are computed with the rounded scales, so the error of a number is at most
half a step: rounding the scale adds nothing to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_HALF = 2**-24
"""The smallest positive float16."""
MAX_CODE = 127
"""The largest magnitude of a symmetric code."""


def quantize_symmetric(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., size], int8, and scale [...], float16, of numbers [..., size]."""
    numbers = numbers.float()
    scale = half_above(numbers.abs().amax(-1) / MAX_CODE)
    codes = _ratio(numbers, scale[..., None]).clamp_(-MAX_CODE, MAX_CODE)
    return codes.to(torch.int8), scale


def quantize_affine(numbers: Tensor, group: int, max_code: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [..., size], uint8, from 0 to `max_code`, and step and lowest number [..., groups], float16."""
    size = numbers.shape[-1]
    grouped = _in_groups(numbers.float(), group)
    low = half_below(grouped.amin(-1))
    step = half_above((grouped.amax(-1) - low.float()) / max_code)
    codes = _ratio(grouped - low.float()[..., None], step[..., None]).clamp_(0, max_code)
    return codes.to(torch.uint8).flatten(-2)[..., :size], step, low


def dequantize_affine(codes: Tensor, step: Tensor, low: Tensor, group: int) -> Tensor:
    """low + step * code: numbers [..., size], float32."""
    size = codes.shape[-1]
    grouped = _in_groups(codes, group)
    numbers = torch.addcmul(low.float()[..., None], grouped.float(), step.float()[..., None])
    return numbers.flatten(-2)[..., :size]


def half_above(numbers: Tensor) -> Tensor:
    """Non-negative numbers rounded up to float16."""
    near = numbers.half()
    return torch.where(near.float() < numbers, (numbers * (1 + 2**-10) + SMALLEST_HALF).half(), near)


def half_below(numbers: Tensor) -> Tensor:
    """Numbers rounded down to float16; -inf below the smallest finite float16."""
    near = numbers.half()
    return torch.where(near.float() > numbers, (numbers - numbers.abs() * 2**-10 - SMALLEST_HALF).half(), near)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., size], uint8, below 2^bits, packed into bytes [..., ceil(size * bits / 8)], the first code lowest."""
    codes_per_byte = 8 // bits
    if codes_per_byte == 1:
        return codes
    padding = -codes.shape[-1] % codes_per_byte
    padded = torch.nn.functional.pad(codes, (0, padding)) if padding else codes
    groups = torch.unflatten(padded, -1, (padded.shape[-1] // codes_per_byte, codes_per_byte))
    packed: Tensor = groups[..., 0].clone()
    for position in range(1, codes_per_byte):
        packed |= groups[..., position] << (position * bits)
    return packed


def unpack_bits(packed: Tensor, bits: int, size: int) -> Tensor:
    """The codes [..., size], uint8, of packed bytes."""
    codes_per_byte = 8 // bits
    if codes_per_byte == 1:
        return packed
    mask = 2**bits - 1
    codes = [(packed >> (position * bits)) & mask for position in range(codes_per_byte)]
    return torch.stack(codes, -1).flatten(-2)[..., :size]


def _in_groups(numbers: Tensor, group: int) -> Tensor:
    """[..., groups, group]; the last group is padded with the last number, which does not widen its range."""
    size = numbers.shape[-1]
    group = min(group, size)
    padding = -size % group
    if padding:
        numbers = torch.cat([numbers, numbers[..., -1:].expand(*numbers.shape[:-1], padding)], -1)
    return torch.unflatten(numbers, -1, (-(-size // group), group))


def _ratio(numbers: Tensor, step: Tensor) -> Tensor:
    # The step is 0 where all numbers of a group are equal, and not finite where one of them is not: both give code 0.
    return (numbers / step.float()).nan_to_num_(0.0, 0.0, 0.0).round_()
