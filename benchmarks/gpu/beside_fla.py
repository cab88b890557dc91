"""The speed of linear recurrences compared with fla-core, if it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attention import said_of
from attn_core.kernels.recurrence import Steps
from attn_kernels_triton.recurrence.compute import by_chunks
from recurrences import Recurrence, timed_cases, times
from torch import Tensor

THEIRS = {
    ("none", False): ("fla.ops.linear_attn", "chunk_linear_attn"),
    ("head", False): ("fla.ops.simple_gla", "chunk_simple_gla"),
    ("channel", False): ("fla.ops.gla", "chunk_gla"),
    ("none", True): ("fla.ops.delta_rule", "chunk_delta_rule"),
    ("head", True): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("channel", True): ("fla.ops.kda", "chunk_kda"),
}
"""The modules and functions of fla-core by kind of decay and whether the delta rule is used."""


def constant(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Compare recurrences without decay."""
    return beside("none", device, small=small)


def by_head(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Compare recurrences with one decay for each head."""
    return beside("head", device, small=small)


def by_channel(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Compare recurrences with one decay for each channel."""
    return beside("channel", device, small=small)


def beside(decay: str, device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Their times divided by attn's for both passes, and the largest difference of the outputs, for each case."""
    for case in timed_cases(small=small):
        if case.decay == decay:
            yield {"case": case.name, "beside": "fla", **compared(case, device)}


def compared(case: Recurrence, device: str) -> dict[str, Any]:
    """Their times divided by attn's and the difference of the outputs, or why they were not measured."""
    if device != "cuda":
        return {"refused": "not on a CPU"}
    module, name = THEIRS[case.decay, case.delta_rule]
    steps = case.steps(device)

    def ours(given: Steps) -> Tensor:
        return by_chunks(given, None)[0]

    try:
        theirs = called(getattr(importlib.import_module(module), name), case)
        with torch.no_grad():
            difference = theirs(steps).float() - ours(steps).float()
        taken = times(theirs, steps, device)
    except Exception as error:  # noqa: BLE001 -- whatever fails in a peer costs this row alone
        return {"refused": said_of(error)}
    own = times(ours, steps, device)
    return {"forward": taken[0] / own[0], "backward": taken[1] / own[1], "apart": float(difference.abs().max())}


def called(function: Callable[..., Any], case: Recurrence) -> Callable[[Steps], Tensor]:
    """Adapt their function to attn's `Steps`."""

    def run(given: Steps) -> Tensor:
        fades = None if given.decay is None else given.decay[..., 0] if case.decay == "head" else given.decay
        more: dict[str, Any] = {"g": fades, "beta": given.strength}
        more = {key: part for key, part in more.items() if part is not None}
        if case.decay == "none" and not case.delta_rule:
            more["normalize"] = False
        out: Tensor = function(given.query, given.key, given.value, scale=1.0, **more)[0]
        return out

    return run
