"""How the memory that forward and backward take grows with the length, from 1024 to 65536 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attn_kernels_triton.attention.attend import attend
from cases import Case
from correctness import results

LENGTHS = tuple(1024 << step for step in range(7))


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Bytes at the peak above those of the operands, for each length, and how many times those of half the length."""
    before = None
    for length in (32, 64) if small else LENGTHS:
        size = 16 if small else 128
        case = Case(name=f"memory, {length}", queries=length, keys=length, sizes=(size, size), heads=(8, 2))
        operands = case.operands(device)
        taken = None
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        results(attend, case.spec, operands)
        if device == "cuda":
            taken = torch.cuda.max_memory_allocated() - held
        grown = taken / before if taken and before else None
        yield {"case": case.name, "peak_bytes": taken, "times_half_the_length": grown}
        before = taken
