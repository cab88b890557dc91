"""Launches of linear recurrences as layers would cause them."""

from __future__ import annotations

import torch
from attn_core.kernels.recurrence import Steps
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.recurrence.compute import given_of
from attn_kernels_triton.recurrence.launch import (
    backward_launches,
    buffers_of,
    decode_launch,
    forward_launches,
    gradients,
)

TOKENS, HEADS = 2048, 4


def scan_launches(
    decay: str, *, delta_rule: bool, size: int = 128, value_size: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Launch]:
    """The programs of one recurrence by name: by chunks both ways, and token by token."""

    def rows(*width: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(1, TOKENS, HEADS, *width, dtype=kind)

    decay_size = {"none": None, "head": 1, "channel": size}[decay]
    values = value_size or size
    steps = Steps(
        query=rows(size),
        key=rows(size),
        value=rows(values),
        decay=None if decay_size is None else rows(decay_size, kind=torch.float32),
        strength=rows(kind=torch.float32) if delta_rule else None,
    )
    given = given_of(steps, torch.empty(1, HEADS, size, values))
    work = buffers_of(given)
    found = gradients(given, work.out, work.after, decays=decay != "none")
    launches = [*forward_launches(given, work), *backward_launches(given, work, found)]
    named = {launch.program.__name__: launch for launch in launches}
    return {**named, "go_through": decode_launch(given, work.out, work.after)}
