"""Measurement of the times of calls, in seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from attn_core import AttentionInputs
from correctness import changed, leaves
from torch import Tensor

REPEATS, WARMING = 20, 3
CACHE_BYTES = 256 << 20
"""The bytes written between calls, more than the GPU's cache holds, so that no call finds its operands cached."""

AHEAD = 4_000_000
"""The cycles (about two milliseconds) that the GPU waits before a call, while the host finishes launching it."""

COPIED = 1 << 30


def rehearse() -> None:
    """From now on, make each call once, without warm-up: used to compile programs; the times are not meaningful."""
    global REPEATS, WARMING
    REPEATS, WARMING = 1, 0


def seconds(call: Callable[[], Any], device: str, most: int = 20) -> float:
    """The median time of a call, after warm-up."""
    for _ in range(WARMING if device == "cuda" else 0):
        call()
    return statistics.median(one(call, device) for _ in range(min(most, REPEATS) if device == "cuda" else 1))


def one(call: Callable[[], Any], device: str) -> float:
    """The GPU time of one call, with none of its operands in the cache.

    The host time to launch the call is not included, as long as it is shorter than the GPU's wait; see `started`.
    """
    if device != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    torch.empty(CACHE_BYTES, dtype=torch.int8, device=device).zero_()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def wait() -> None:
    """Make the GPU wait for `AHEAD` cycles."""
    torch.cuda._sleep(AHEAD)  # noqa: SLF001 -- torch's own tests wait by it, and nothing public does


def started(call: Callable[[], Any], device: str) -> float:
    """The median host time to launch a call, while the GPU waits."""
    times = []
    for _ in range(REPEATS if device == "cuda" else 1):
        if device == "cuda":
            torch.cuda.synchronize()
            wait()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@cache
def copied_per_second(device: str) -> float:
    """The bytes per second read and written by copying a tensor that is larger than any cache."""
    size = COPIED if device == "cuda" else COPIED >> 6
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def forward_and_backward(
    run: Callable[[AttentionInputs], Tensor], operands: AttentionInputs, device: str
) -> tuple[float, float]:
    """The times of the forward pass, and of the backward pass alone."""
    with torch.no_grad():
        forward = seconds(lambda: run(operands), device)
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in leaves(operands).items()}
    out = run(changed(operands, tensors))
    change = torch.randn_like(out)
    return forward, seconds(lambda: torch.autograd.grad(out, list(tensors.values()), change, retain_graph=True), device)
