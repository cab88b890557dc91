"""The schedules of the dense forward pass: whether each is right on this GPU, and how fast each is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attn_core import Causal, Full, Window
from attn_kernels_triton.attention import tiles
from attn_kernels_triton.attention.attend import attend
from attn_kernels_triton.attention.tiles import Choice
from cases import Case
from correctness import verdicts as verdicts_of
from timing import seconds

CHOICES = {
    64: (Choice(128, 128, 8, 2, "descriptors"), Choice(128, 128, 4, 2, "specialised")),
    128: (
        Choice(128, 128, 8, 2, "descriptors"),
        Choice(128, 64, 8, 3, "descriptors"),
        Choice(128, 128, 4, 2, "specialised"),
        Choice(128, 64, 4, 3, "specialised"),
    ),
}
"""By width; none of them spills."""


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """What `correctness` says of bands under every schedule."""
    masks = (Causal(),) if small else (Full(), Causal(), Window(left=100, right=9))
    for width, choices in CHOICES.items():
        for choice in choices if device == "cuda" else smaller(choices):
            tiles.DENSE_CHOICES[width] = choice
            shape: dict[str, Any] = {"sizes": (16, 16), "queries": 20, "keys": 33, "dtype": "float16"}
            shape = {"sizes": (width, width)} if device == "cuda" else shape
            cases = [Case(name=f"{mask.kind}, {width}, {said(choice)}", mask=mask, **shape) for mask in masks]
            yield from verdicts_of(cases, device)


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Times and rates of the forward pass under every schedule."""
    for width, choices in CHOICES.items():
        for mask in (Full(), Causal()):
            for length in (32,) if small else (4096, 16384):
                size, heads = (16, (2, 2)) if small else (width, (16, 16))
                shape: dict[str, Any] = {"queries": length, "keys": length, "sizes": (size, size), "heads": heads}
                case = Case(name=f"{mask.kind} {length}, {width}", mask=mask, dtype="float16", **shape)
                operands = case.operands(device)
                flops = 4 * mask.count(length, length) * size * heads[0]
                for choice in smaller(choices)[:1] if small else choices:
                    tiles.DENSE_CHOICES[width] = choice
                    with torch.no_grad():
                        took = seconds(lambda c=case, o=operands: attend(c.spec, o), device, 10)
                    yield {"case": f"{case.name}, {said(choice)}", "ms": 1e3 * took, "tflops": flops / took / 1e12}


def smaller(choices: tuple[Choice, ...]) -> list[Choice]:
    """Each schedule once, with tiles for the interpreter."""
    return [Choice(16, 16, 4, 1, schedule) for schedule in sorted({choice.schedule for choice in choices})]


def said(choice: Choice) -> str:
    """A choice in words."""
    return f"{choice.schedule} {choice.queries} x {choice.keys}, {choice.warps} warps, {choice.stages} stages"
