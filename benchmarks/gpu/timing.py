"""Times of calls, in seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attn_core import Operands
from correctness import changed, leaves
from torch import Tensor

REPEATS = 20
CACHE_BYTES = 256 << 20
"""More than the cache of the chip, written between calls so that none finds its operands there."""


COPIED = 1 << 30


def seconds(call: Callable[[], Any], device: str, repeats: int = REPEATS) -> float:
    """The median time of a call, after warming up."""
    for _ in range(3 if device == "cuda" else 0):
        call()
    return statistics.median(one(call, device) for _ in range(repeats if device == "cuda" else 1))


def one(call: Callable[[], Any], device: str) -> float:
    """The time of one call with nothing of its operands in the cache."""
    if device != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    torch.empty(CACHE_BYTES, dtype=torch.int8, device=device).zero_()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def copied_per_second(device: str) -> float:
    """Bytes that are read and written in a second by copying a tensor that no cache holds."""
    size = COPIED if device == "cuda" else COPIED >> 6
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def forward_and_backward(run: Callable[[Operands], Tensor], operands: Operands, device: str) -> tuple[float, float]:
    """Times of the forward pass, and of the backward pass alone."""
    with torch.no_grad():
        forward = seconds(lambda: run(operands), device)
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in leaves(operands).items()}
    out = run(changed(operands, tensors))
    change = torch.randn_like(out)
    return forward, seconds(lambda: torch.autograd.grad(out, list(tensors.values()), change, retain_graph=True), device)
