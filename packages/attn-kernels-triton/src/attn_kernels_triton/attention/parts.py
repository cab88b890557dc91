"""How many sums of the gradient to queries programs keep apart, and whether so many fill the chip."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.launch import power_of_two

MOST = 8
"""Parts at most."""
MEMORY = 1 << 30
"""Bytes of all parts at most."""
FILLED = 0.75
"""The share of the chip that must be at work: below 5/7, two programs with seven products would be faster."""
USUAL = 132
"""Processors of an H200, which stand for those of chips that are only compiled for."""


class Division(NamedTuple):
    """How many parts, and the share of processors that work on them, in whole turns of one program each."""

    number: int
    filled: float


def parts_of(plan: Plan, tiles: int, device: torch.device) -> Division:
    """The parts, of which there are no more than tiles of keys, that keep most processors busy, and the fewest such."""
    owners, many = plan.batch * plan.shape.heads // plan.shape.group, processors(device)
    each = plan.batch * plan.shape.heads * plan.shape.queries * power_of_two(plan.sizes.key_size) * 4
    most = max(1, min(MOST, tiles, MEMORY // max(1, each)))
    found = [Division(count, share(count * owners, many)) for count in range(1, most + 1)]
    return max(found, key=lambda one: (round(one.filled, 2), -one.number))


def share(programs: int, many: int) -> float:
    """The share of processors that work, of which each has one program at a time."""
    return programs / (max(1, -(-programs // many)) * many)


@cache
def processors(device: torch.device) -> int:
    """How many programs run at once, where each takes a whole processor."""
    if device.type != "cuda":
        return USUAL
    return torch.cuda.get_device_properties(device).multi_processor_count
