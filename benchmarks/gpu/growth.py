"""The growth of the memory of forward and backward with the sequence length, from 1024 to 65536 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attn_kernels_triton.attention.attend import attend
from cases import Case
from correctness import changed, leaves

LENGTHS = tuple(1024 << step for step in range(7))


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The peak memory beyond the operands, in bytes, for each length.

    `as_linear` is twice the memory of half the length divided by that of this length: 1 if memory grows linearly.
    """
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
        tensors = {name: tensor.detach().requires_grad_() for name, tensor in leaves(operands).items()}
        out = attend(case.spec, changed(operands, tensors))
        torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))
        if device == "cuda":
            taken = torch.cuda.max_memory_allocated() - held
        row = {"case": case.name, "length": length, "peak_bytes": taken}
        yield {**row, "as_linear": 2 * before / taken} if before and taken else row
        before = taken
