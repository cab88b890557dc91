"""Measuring the candidates of every kind on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from attn_core import AttentionSpec, Causal, Full, Heads, Mask, Operands

from attn_kernels_triton.attention.forward import Inputs, empty, launch_of
from attn_kernels_triton.attention.plan import plan_of
from attn_kernels_triton.attention.tiles import Choice, dense_choice
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.tuning.candidates import CANDIDATES, LONG, Kind, kind_of

MASKS: tuple[Mask, ...] = (Full(), Causal())
LENGTHS = (LONG // 2, 2 * LONG)
HEADS, REPEATS, WARMING = 16, 10, 3


class Measured(NamedTuple):
    """A candidate of a kind, and its median time in seconds."""

    kind: Kind
    choice: Choice
    seconds: float


def measure(device: torch.device, lengths: tuple[int, ...] = LENGTHS, repeats: int = REPEATS) -> Iterator[Measured]:
    """Times of all candidates of all kinds: 20 programs, about a minute, most of which the compiler takes."""
    for width, candidates in CANDIDATES.items():
        for length in lengths:
            rows = torch.randn(3, 1, length, HEADS, width, device=device).bfloat16()
            inputs = Inputs(*rows)
            heads = Heads(query=HEADS, key_value=HEADS, key_size=width, value_size=width)
            for mask in MASKS:
                operands = Operands(query=inputs.query, key=inputs.key, value=inputs.value)
                plan = plan_of(AttentionSpec(heads=heads, mask=mask), operands)
                for candidate in candidates:
                    launch = launch_of(plan, inputs, empty(plan, inputs), dense_choice(plan.sizes, candidate))
                    times = [timed(launch, device) for _ in range(WARMING + repeats)]
                    yield Measured(kind_of(plan.sizes, plan.rule), candidate, statistics.median(times[-repeats:]))


def timed(launch: Launch, device: torch.device) -> float:
    """The time of one launch, in seconds."""
    if device.type != "cuda":
        started = time.perf_counter()
        launch.run(device)
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    launch.run(device)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def best(found: list[Measured]) -> dict[str, Choice]:
    """The fastest candidate of each kind, by its name."""
    fastest: dict[str, Measured] = {}
    for one in found:
        if one.kind.name not in fastest or one.seconds < fastest[one.kind.name].seconds:
            fastest[one.kind.name] = one
    return {name: one.choice for name, one in fastest.items()}
