"""The choices of programs: those that were measured on this device, else those that are shipped."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from attn_kernels_triton.attention.parts import FILLED, parts_of
from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.tiles import DENSE_APART, DENSE_BACKWARD, NARROWEST, Choice, dense_choice, no_larger
from attn_kernels_triton.launch import power_of_two
from attn_kernels_triton.paged.choices import PagedChoice
from attn_kernels_triton.scan.tiles import NARROWEST as NARROWEST_KEYS
from attn_kernels_triton.scan.tiles import ScanChoice, scan_choice
from attn_kernels_triton.scan.work import Given
from attn_kernels_triton.tuning.candidates import Candidate, kind_of, paged_name, recurrence_name
from attn_kernels_triton.tuning.table import read

Kept = TypeVar("Kept", bound=Candidate)
WIDE = 128


def chosen(plan: Plan, device: torch.device) -> Choice:
    """The choice for a band whose tiles the chip copies."""
    return dense_choice(plan.sizes, known(Choice, kind_of(plan.sizes, plan.rule).name, device))


def chosen_backward(plan: Plan, device: torch.device) -> tuple[Choice, ...]:
    """The choices of the backward programs of such a band: of one that joins all gradients where it fills the chip."""
    width = max(NARROWEST, plan.sizes.width)
    found = known(tuple, kind_of(plan.sizes, plan.rule).backward, device) or DENSE_BACKWARD[width]
    if found[0].schedule == "joined":
        tiles = -(-plan.sizes.keys // no_larger(found[0], plan.sizes).keys)
        if crowded(plan) or parts_of(plan, tiles, device).filled < FILLED:
            found = DENSE_APART[width]
    return tuple(no_larger(choice, plan.sizes) for choice in found)


def crowded(plan: Plan) -> bool:
    """Whether wide heads leave too few registers to join gradients and ask for a second bound, or for the last key."""
    ragged = plan.rule.right is None and plan.sizes.keys % DENSE_BACKWARD[WIDE][0].keys != 0
    return plan.sizes.width >= WIDE and (plan.rule.left is not None or ragged)


def measured_paged(query: Tensor, form: str, sizes: tuple[int, int]) -> PagedChoice | None:
    """What was measured for tiles of few rows over pages in a form, of keys and values of these sizes; of codes and
    elements of 32 bits nothing is."""
    if form != "plain" or query.dtype.itemsize > 2:
        return None
    return known(PagedChoice, paged_name(max(NARROWEST, power_of_two(max(sizes)))), query.device)


def chosen_scan(program: str, given: Given) -> ScanChoice:
    """The choice for a program of a recurrence over chunks; elements of 32 bits have none but what is shipped, nor have
    wide keys."""
    found, sizes = None, given.sizes
    if sizes.dtype.itemsize == 2 and sizes.key_size <= NARROWEST_KEYS:
        found = known(ScanChoice, recurrence_name(program, channels=sizes.channels), given.key.device)
    return scan_choice(program, sizes, found)


def known(kind: type[Kept], name: str, device: torch.device) -> Kept | None:
    """The candidate of a kind, by its name, that was measured on a device, if one was."""
    found = measured(name_of(device)).get(name)
    return found if isinstance(found, kind) else None


@cache
def measured(device: str) -> dict[str, Candidate]:
    """What was measured on devices of this name; read once a process."""
    return read(device)


@cache
def name_of(device: torch.device) -> str:
    """The name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
