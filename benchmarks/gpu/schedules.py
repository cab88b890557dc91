"""The schedules of the dense forward pass: whether each is right on this GPU, and how fast each is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attn_core import Causal, Full, Window
from attn_kernels_triton.attention import tiles
from attn_kernels_triton.attention.tiles import Choice
from attn_kernels_triton.tuning.candidates import CANDIDATES
from attn_kernels_triton.tuning.chosen import name_of
from attn_kernels_triton.tuning.measure import best, measure
from attn_kernels_triton.tuning.table import add
from cases import Case
from correctness import verdicts as verdicts_of


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """What `correctness` says of bands under every schedule."""
    masks = (Causal(),) if small else (Full(), Causal(), Window(left=100, right=9))
    for width, choices in CANDIDATES.items():
        for choice in smaller(choices) if small and device == "cpu" else choices:
            tiles.DENSE_CHOICES[width] = choice
            shape: dict[str, Any] = {"sizes": (width, width)}
            if small:
                shape |= {"queries": 20, "keys": 33, "dtype": "float16"}
            if small and device == "cpu":
                shape |= {"sizes": (16, 16)}
            cases = [Case(name=f"{mask.kind}, {width}, {said(choice)}", mask=mask, **shape) for mask in masks]
            yield from verdicts_of(cases, device)


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Times of every candidate, as the tuner takes them; the fastest are kept, and what is measured next takes them."""
    target = torch.device(device)
    found = []
    for one in measure(target, (32,), 1) if small else measure(target):
        found.append(one)
        yield {"case": f"tuning, {one.kind.name}, {said(one.choice)}", "ms": 1e3 * one.seconds}
    yield {"tuned": {name: said(choice) for name, choice in best(found).items()}}
    if device == "cuda":
        add(name_of(target), best(found))


def prepare(device: str, *, small: bool) -> Iterator[dict[str, Any]]:  # noqa: ARG001 -- only where sizes are real
    """Have every candidate compiled; nothing is kept."""
    for one in measure(torch.device(device), repeats=1):
        yield {"case": one.kind.name}


def smaller(choices: tuple[Choice, ...]) -> list[Choice]:
    """Each schedule once, with tiles for the interpreter."""
    return [Choice(16, 16, 4, 1, schedule) for schedule in sorted({choice.schedule for choice in choices})]


def said(choice: Choice) -> str:
    """A choice in words."""
    return f"{choice.schedule} {choice.queries} x {choice.keys}, {choice.warps} warps, {choice.stages} stages"
