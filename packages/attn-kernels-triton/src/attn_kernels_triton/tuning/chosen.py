"""The choice of a forward program: the one that was measured on this device, else the one that is shipped."""

from __future__ import annotations

from functools import cache

import torch

from attn_kernels_triton.attention.parts import FILLED, parts_of
from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.tiles import DENSE_APART, DENSE_BACKWARD, NARROWEST, Choice, dense_choice, no_larger
from attn_kernels_triton.tuning.candidates import kind_of
from attn_kernels_triton.tuning.table import read


def chosen(plan: Plan, device: torch.device) -> Choice:
    """The choice for a band whose tiles the chip copies."""
    return dense_choice(plan.sizes, measured(name_of(device)).get(kind_of(plan.sizes, plan.rule).name))


def chosen_backward(plan: Plan, device: torch.device) -> tuple[Choice, ...]:
    """The choices of the backward programs of such a band: of one that joins all gradients where it fills the chip."""
    width = max(NARROWEST, plan.sizes.width)
    found = DENSE_BACKWARD[width]
    if found[0].schedule == "joined":
        tiles = -(-plan.sizes.keys // no_larger(found[0], plan.sizes).keys)
        if parts_of(plan, tiles, device).filled < FILLED:
            found = DENSE_APART[width]
    return tuple(no_larger(choice, plan.sizes) for choice in found)


@cache
def measured(device: str) -> dict[str, Choice]:
    """What was measured on devices of this name; read once a process."""
    return read(device)


@cache
def name_of(device: torch.device) -> str:
    """The name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
