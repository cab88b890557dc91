"""The speed of softmax attention compared with torch's own. FLOPs are counted for the pairs that the mask allows."""

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
"""The sequence lengths; those with performance targets come first."""

TOKENS = 16384
"""The number of tokens in a batch, for every length."""


def dense(*, small: bool) -> list[Case]:
    """Cases of full and causal attention with as many queries as keys."""
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
    """The times of dense attention, each compared with torch's backends."""
    for case in dense(small=small):
        said = {"case": case.name, "mask": case.mask.kind, "length": case.queries}
        yield {**said, **timed(case, device)}
        for name, backend in BACKENDS.items():
            yield {**said, **beside(name, case, sdpa(case, backend), device)}


def features(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The times of features that no peer computes in one kernel, and of attention without them."""
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
    """The times and rates of attn, the peak memory of both passes, and the host time to launch the forward pass.

    `pairs` is the number of allowed pairs over all heads, if it cannot be computed from the mask.
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


def beside(name: str, case: Case, other: Attention, device: str) -> dict[str, Any]:
    """The times of another implementation divided by attn's, measured one after the other; or why it could not run."""
    operands = case.operands(device)
    try:
        theirs = forward_and_backward(other, operands, device)
    except Exception as error:  # noqa: BLE001 -- whatever fails in a peer costs this row alone
        return {"beside": name, "refused": said_of(error)}
    ours = forward_and_backward(lambda given: attend(case.spec, given), operands, device)
    return {"beside": name, "forward": theirs[0] / ours[0], "backward": theirs[1] / ours[1]}


def said_of(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
