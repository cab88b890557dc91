"""How fast attention of the softmax family is beside torch's own. Flops count the pairs that a mask leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attn_core import BigBird, Causal, Full, Prefix, Segments, T5Bias, Window
from attn_core.dropout import Dropout
from attn_core.packed import Packed
from attn_kernels_triton.attention.attend import attend
from cases import Case
from peers import BACKENDS, flex, sdpa
from timing import forward_and_backward

LENGTHS = (1024, 4096, 8192, 16384)
TOKENS = 16384
"""Tokens of a batch, whatever the length."""

TEXTS = (37, 900, 100, 2048, 3000, 500, 1644, 64, 8, 4096, 1200, 300, 2487)
"""16384 tokens."""

DOCUMENTS = (900, 100, 2048, 3000, 500, 1644)


def dense(*, small: bool) -> list[Case]:
    """Full and causal attention over equal lengths."""
    lengths = (32,) if small else LENGTHS
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
        for mask in (Full(), Causal())
        for length in lengths
    ]


def patterns(*, small: bool) -> list[Case]:
    """Masks that leave a part, over 8192 tokens."""
    length, size, heads = (64, 16, (2, 2)) if small else (8192, 128, (16, 4))
    masks = {
        "window 512": Window(left=512),
        "prefix of 1024": Causal() | Prefix(1024),
        "packed documents": Causal() & Segments(DOCUMENTS),
        "big bird": BigBird(block=64, random=3, number_of_heads=heads[0]),
    }
    same = {"queries": length, "keys": length, "sizes": (size, size), "heads": heads}
    return [Case(name=name, mask=mask, **same) for name, mask in masks.items()]


def packed(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Times of packed texts beside equal work of padded rows, of which none is padding.

    `of_padded` is our rate over packed texts divided by that over rows of the length at which as many pairs meet.
    """
    size, heads = (16, (2, 2)) if small else (128, (16, 16))
    choices = {"equal texts": (40, 40), "texts": (33, 1, 6)} if small else {"equal texts": (2048,) * 8, "texts": TEXTS}
    for name, lengths in choices.items():
        total, pairs = sum(lengths), sum(length**2 for length in lengths)
        same = {"sizes": (size, size), "heads": heads}
        case = Case(name=f"packed {name}", packed=Packed.of(lengths), queries=total, keys=total, **same)
        row = timed(case, device, sum(length * (length + 1) // 2 for length in lengths) * heads[0])
        length = round(pairs / total)
        padded = timed(Case(name="padded", queries=length, keys=length, batch=max(1, total // length), **same), device)
        shares = {f"{way}_of_padded": row[f"{way}_tflops"] / padded[f"{way}_tflops"] for way in ("forward", "backward")}
        yield {**row, **shares}


def further(*, small: bool) -> list[Case]:
    """What no peer computes in one program, timed alone."""
    length, size, heads = (64, 16, (2, 2)) if small else (4096, 64, (16, 16))
    same = {"queries": length, "keys": length, "sizes": (size, size), "heads": heads}
    return [
        Case(name="biases of T5", modifiers=(T5Bias(),), **same),
        Case(name="dropout", dropout=Dropout(probability=0.1, seed=1), **same),
        Case(name="neither", **same),
    ]


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Times of dense attention beside torch's backends, and of masks beside FlexAttention."""
    for case in dense(small=small):
        yield {**timed(case, device), **beside(case, device)}
    yield from packed(device, small=small)
    for case in further(small=small):
        yield timed(case, device)
    for case in patterns(small=small):
        yield {**timed(case, device), **beside_flex(case, device)}


def timed(case: Case, device: str, met: int | None = None) -> dict[str, Any]:
    """Our times and rates, and the memory that forward and backward take at their peak; `met` pairs, if it is known."""
    operands = case.operands(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forward, backward = forward_and_backward(lambda given: attend(case.spec, given), operands, device)
    pairs = met or case.mask.count(case.queries, case.keys) * (1 if case.mask.heads else case.heads[0])
    flops = 2 * case.batch * pairs * sum(case.sizes)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "case": case.name,
        "forward_ms": 1e3 * forward,
        "backward_ms": 1e3 * backward,
        "forward_tflops": flops / forward / 1e12,
        "backward_tflops": 2.5 * flops / backward / 1e12,
        "peak_bytes": peak,
    }


def beside(case: Case, device: str) -> dict[str, Any]:
    """How many times our time torch's own attention takes."""
    return {} if device != "cuda" else {name: ratios(case, sdpa(case, back)) for name, back in BACKENDS.items()}


def beside_flex(case: Case, device: str) -> dict[str, Any]:
    """How many times our time compiled FlexAttention takes."""
    return {} if device != "cuda" else {"flex": ratios(case, flex(case, device))}


def ratios(case: Case, other: Any) -> dict[str, float] | str:
    """Forward and backward times of another computation, divided by ours, measured one after the other."""
    operands = case.operands("cuda")
    try:
        theirs = forward_and_backward(other, operands, "cuda")
    except RuntimeError as error:
        return f"refused: {str(error).splitlines()[0]}"
    ours = forward_and_backward(lambda given: attend(case.spec, given), operands, "cuda")
    return {"forward": theirs[0] / ours[0], "backward": theirs[1] / ours[1]}
