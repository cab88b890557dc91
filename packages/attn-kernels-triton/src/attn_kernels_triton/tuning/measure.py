"""Measuring the tuning candidates on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from attn_kernels_triton.launch import Launch
from attn_kernels_triton.tuning.candidates import Candidate
from attn_kernels_triton.tuning.trials import Trial, trials

REPEATS, WARMING = 10, 3
EACH = 3
"""An estimate of the seconds per candidate, most of which are compile time."""


class Measured(NamedTuple):
    """The name of a kind of call, a candidate for it, and the candidate's median time in seconds."""

    name: str
    choice: Candidate
    seconds: float


def measure(device: torch.device, wanted: Iterable[Trial] | None = None, repeats: int = REPEATS) -> Iterator[Measured]:
    """The times of all candidates of all kinds, or of the trials `wanted`."""
    for trial in trials(device) if wanted is None else wanted:
        times = [timed(trial.launches, device) for _ in range(WARMING + repeats)]
        yield Measured(trial.name, trial.candidate, statistics.median(times[-repeats:]))


def timed(launches: tuple[Launch, ...], device: torch.device) -> float:
    """The time of some launches in sequence, in seconds."""
    if device.type != "cuda":
        started = time.perf_counter()
        run(launches, device)
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # The GPU runs the same launches first while the CPU enqueues the timed ones, so launch overhead is not measured.
    run(launches, device)
    start.record()
    run(launches, device)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


def run(launches: tuple[Launch, ...], device: torch.device) -> None:
    """Run the launches in sequence."""
    for launch in launches:
        launch.run(device)


def best(found: list[Measured]) -> dict[str, Candidate]:
    """The fastest candidate of each kind, by the name of the kind."""
    fastest: dict[str, Measured] = {}
    for one in found:
        if one.name not in fastest or one.seconds < fastest[one.name].seconds:
            fastest[one.name] = one
    return {name: one.choice for name, one in fastest.items()}
