"""The candidate schedules for tuning kernels: correctness of those for band masks on this GPU, and their times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attn_core import Causal, Full, Window
from attn_kernels_triton.attention import tiles
from attn_kernels_triton.attention.tiles import Choice
from attn_kernels_triton.tuning import trials as attention
from attn_kernels_triton.tuning.candidates import BACKWARD, CANDIDATES
from attn_kernels_triton.tuning.measure import best, measure
from attn_kernels_triton.tuning.store import add, name_of
from cases import Case
from correctness import verdicts as verdicts_of


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on band masks with every schedule of the forward pass."""
    for width, choices in CANDIDATES.items():
        for choice in smaller(choices) if small and device == "cpu" else choices:
            tiles.DENSE_CHOICES[width] = choice
            yield from verdicts_of(cases(f"{width}, {said(choice)}", width, device, small=small), device)


def gradients(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on band masks with every schedule of the backward pass."""
    for width, backward in BACKWARD.items():
        for both in backward:
            tried = smaller(both) if small and device == "cpu" else both
            tiles.DENSE_BACKWARD[width] = tiles.DENSE_BACKWARD_BOUNDED[width] = tried
            yield from verdicts_of(cases(f"{width}, gradients, {said(both)}", width, device, small=small), device)


def cases(name: str, width: int, device: str, *, small: bool) -> list[Case]:
    """The cases of band masks with this head size."""
    masks = (Causal(),) if small else (Full(), Causal(), Window(left=100, right=9))
    shape: dict[str, Any] = {"sizes": (width, width)}
    if small:
        shape |= {"queries": 20, "keys": 33, "dtype": "float16"}
    if small and device == "cpu":
        shape |= {"sizes": (16, 16)}
    return [Case(name=f"{mask.kind}, {name}", mask=mask, **shape) for mask in masks]


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The times of every candidate, as the tuner measures them; the fastest are saved for the later measurements."""
    target = torch.device(device)
    found = []
    for one in measure(target, *few(device, small=small)):
        found.append(one)
        yield {"case": f"tuning, {one.name}, {said(one.choice)}", "ms": 1e3 * one.seconds}
        if device == "cuda" and best(found)[one.name] is one.choice:
            # Save at once, so that nothing is lost if this part is stopped early.
            add(name_of(target), {one.name: one.choice})
    yield {"tuned": {name: said(choice) for name, choice in best(found).items()}}


def few(device: str, *, small: bool) -> tuple[Any, ...]:
    """The arguments of `measure` in a rehearsal: the forward candidates with 32 tokens, measured once; else none."""
    if not small:
        return ()
    attention.LENGTHS = (32,)
    return attention.forward_trials(torch.device(device)), 1


def prepare(device: str, *, small: bool) -> Iterator[dict[str, Any]]:  # noqa: ARG001 -- only where sizes are real
    """Compile every candidate; no result is saved."""
    for one in measure(torch.device(device), repeats=1):
        yield {"case": one.name}


def smaller(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """The same number of choices of each schedule, with small tiles for Triton's interpreter."""
    return tuple(Choice(16, 16, 4, 1, schedule) for schedule in sorted(choice.schedule for choice in choices))


def said(candidate: Any) -> str:
    """The description of a candidate as text."""
    if isinstance(candidate[0], tuple):
        return "; ".join(map(said, candidate))
    return ", ".join(f"{number} {name}" for name, number in candidate._asdict().items())
