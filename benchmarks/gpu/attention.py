"""How fast attention of the softmax family is beside torch's own. Flops count the pairs that a mask leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attn_core import Causal, Full
from attn_core.dropout import Dropout
from attn_core.modifiers import T5Bias
from attn_kernels_triton.attention.attend import attend
from cases import Case
from peers import BACKENDS, Attention, sdpa
from timing import forward_and_backward, started

LENGTHS = (4096, 8192, 16384, 1024)
"""Those that bars are about first."""

TOKENS = 16384
"""Tokens of a batch, whatever the length."""


def dense(*, small: bool) -> list[Case]:
    """Full and causal attention over equal lengths."""
    size = 16 if small else 128
    return [
        Case(
            name=f"{mask.kind} {length}",
            mask=mask,
            queries=length,
            keys=length,
            batch=1 if small else max(1, TOKENS // length),
            heads=(2, 2) if small else (16, 16),
            sizes=(size, size),
        )
        for length in ((32,) if small else LENGTHS)
        for mask in (Full(), Causal())
    ]


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Times of dense attention, each beside torch's backends."""
    for case in dense(small=small):
        said = {"case": case.name, "mask": case.mask.kind, "length": case.queries}
        yield {**said, **timed(case, device)}
        for name, backend in BACKENDS.items() if device == "cuda" else ():
            yield {**said, **beside(name, case, sdpa(case, backend))}


def features(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Times of what no peer computes in one program, and of the same without it."""
    length, size, heads = (64, 16, (2, 2)) if small else (4096, 64, (16, 16))
    same: dict[str, Any] = {"queries": length, "keys": length, "sizes": (size, size), "heads": heads}
    cases = [
        Case(name="biases of T5", modifiers=(T5Bias(),), **same),
        Case(name="dropout", dropout=Dropout(probability=0.1, seed=1), **same),
        Case(name="neither", **same),
    ]
    for case in cases:
        yield {"case": case.name, **timed(case, device)}


def timed(case: Case, device: str, pairs: int | None = None) -> dict[str, Any]:
    """Our times and rates, the memory at the peak of both passes, and the processor's time to start the first.

    `pairs` of all heads may be given where the mask does not say them.
    """
    operands = case.operands(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forward, backward = forward_and_backward(lambda given: attend(case.spec, given), operands, device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    with torch.no_grad():
        host = started(lambda: attend(case.spec, operands), device)
    if pairs is None:
        pairs = case.mask.count(case.queries, case.keys) * (1 if case.mask.heads else case.heads[0])
    flops = 2 * case.batch * pairs * sum(case.sizes)
    return {
        "forward_ms": 1e3 * forward,
        "backward_ms": 1e3 * backward,
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / backward / 1e12,
        "start_forward_ms": 1e3 * host,
        "peak_bytes": peak,
    }


def beside(name: str, case: Case, other: Attention) -> dict[str, Any]:
    """How many times our time another computation takes, measured one after the other; or why it cannot be said."""
    operands = case.operands("cuda")
    try:
        theirs = forward_and_backward(other, operands, "cuda")
    except Exception as error:  # noqa: BLE001 -- whatever fails in a peer costs this row alone
        return {"beside": name, "refused": said_of(error)}
    ours = forward_and_backward(lambda given: attend(case.spec, given), operands, "cuda")
    return {"beside": name, "forward": theirs[0] / ours[0], "backward": theirs[1] / ours[1]}


def said_of(error: Exception) -> str:
    """The kind of an error and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
