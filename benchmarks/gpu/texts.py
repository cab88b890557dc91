"""The speed of packed texts (varlen), compared with batches of equal lengths, without padding, and equal work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attention import timed
from attn_core.kernels.attend import Varlen
from cases import Case

EQUAL = (2048,) * 8
MIXED = (37, 900, 100, 2048, 3000, 500, 1644, 64, 8, 4096, 1200, 300, 2487)
"""Lengths of texts with 16384 tokens in total."""


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """`forward` and `backward` are the rates for packed texts, divided by those for sequences of their mean length.

    The mean is weighted by tokens, so that such sequences have as many pairs per token as the texts.
    """
    size, heads = (16, (2, 2)) if small else (128, (16, 16))
    same: dict[str, Any] = {"sizes": (size, size), "heads": heads}
    for name, lengths in {"equal": (40, 40) if small else EQUAL, "mixed": (33, 1, 6) if small else MIXED}.items():
        total, pairs = sum(lengths), sum(length**2 for length in lengths)
        case = Case(name=f"packed texts, {name}", varlen=Varlen.of(lengths), queries=total, keys=total, **same)
        row = timed(case, device, sum(length * (length + 1) // 2 for length in lengths) * heads[0])
        length = round(pairs / total)
        padded = timed(Case(name="padded", queries=length, keys=length, batch=max(1, total // length), **same), device)
        shares = {way: row[f"{way}_tflops"] / padded[f"{way}_tflops"] for way in ("forward", "backward")}
        yield {"case": case.name, "beside": "padded rows", **row, **shares}
