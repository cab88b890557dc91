"""The choice of a forward program: the one that was measured on this device, else the one that is shipped."""

from __future__ import annotations

from functools import cache

import torch

from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.tiles import Choice, dense_choice
from attn_kernels_triton.tuning.candidates import kind_of
from attn_kernels_triton.tuning.table import read


def chosen(plan: Plan, device: torch.device) -> Choice:
    """The choice for a band whose tiles the chip copies."""
    return dense_choice(plan.sizes, measured(name_of(device)).get(kind_of(plan.sizes, plan.rule).name))


@cache
def measured(device: str) -> dict[str, Choice]:
    """What was measured on devices of this name; read once a process."""
    return read(device)


@cache
def name_of(device: torch.device) -> str:
    """The name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
