"""Numbers to codes and back. Scales are rounded first and codes are taken by the rounded ones, so that an error is at
most half a step and rounding a scale adds nothing to it."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 2**-24
"""The smallest positive float16."""
MOST = 127
"""The largest magnitude of a symmetric code."""


def symmetric(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., size], int8, and the scale [...], float16, of numbers [..., size]."""
    numbers = numbers.float()
    scale = half_above(numbers.abs().amax(-1) / MOST)
    codes = _ratio(numbers, scale[..., None]).clamp_(-MOST, MOST)
    return codes.to(torch.int8), scale


def affine(numbers: Tensor, group: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [..., size], uint8, from 0 to `most`, with the step and the lowest number [..., groups], float16."""
    size = numbers.shape[-1]
    grouped = _in_groups(numbers.float(), group)
    low = half_below(grouped.amin(-1))
    step = half_above((grouped.amax(-1) - low.float()) / most)
    codes = _ratio(grouped - low.float()[..., None], step[..., None]).clamp_(0, most)
    return codes.to(torch.uint8).flatten(-2)[..., :size], step, low


def from_affine(codes: Tensor, step: Tensor, low: Tensor, group: int) -> Tensor:
    """The numbers [..., size], float32, that these codes, steps and lowest numbers stand for."""
    size = codes.shape[-1]
    grouped = _in_groups(codes, group)
    numbers = torch.addcmul(low.float()[..., None], grouped.float(), step.float()[..., None])
    return numbers.flatten(-2)[..., :size]


def half_above(numbers: Tensor) -> Tensor:
    """The numbers, at least 0, as float16, never smaller than they are."""
    near = numbers.half()
    return torch.where(near.float() < numbers, (numbers * (1 + 2**-10) + SMALLEST).half(), near)


def half_below(numbers: Tensor) -> Tensor:
    """The numbers as float16, never larger than they are; infinite below the smallest that float16 holds."""
    near = numbers.half()
    return torch.where(near.float() > numbers, (numbers - numbers.abs() * 2**-10 - SMALLEST).half(), near)


def _in_groups(numbers: Tensor, group: int) -> Tensor:
    """[..., groups, group]; the last number fills what is missing of the last group, as it widens no range."""
    size = numbers.shape[-1]
    group = min(group, size)
    missing = -size % group
    if missing:
        numbers = torch.cat([numbers, numbers[..., -1:].expand(*numbers.shape[:-1], missing)], -1)
    return numbers.reshape(*numbers.shape[:-1], -1, group)


def _ratio(numbers: Tensor, step: Tensor) -> Tensor:
    # Where all numbers of a group are one, the step is 0; where one is not finite, no code can help.
    return (numbers / step.float()).nan_to_num_(0.0, 0.0, 0.0).round_()
