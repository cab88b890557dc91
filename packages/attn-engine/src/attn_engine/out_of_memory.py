"""Steps for which a device has too little memory: which errors say so, what callers are told, what is given back.

A step needs memory beyond weights and cache, which are taken when a model is loaded. Where it is not there, each
request of the step is computed alone; one that does not fit alone ends with `OutOfCapacity`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from attn_core.errors import AttnError, InternalError, OutOfCapacity

T = TypeVar("T")

SAID = ("out of memory", "can't allocate memory")
"""What torch's allocators say where the error has no class of its own: MPS and the CPU."""
REMEDY = (
    "fewer tokens in a step (--max-num-batched-tokens), fewer sequences (--max-num-seqs) or a smaller KV cache "
    "(--gpu-memory-utilization, --kv-cache-memory-bytes) leave more"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory of a device or of the host could not be allocated."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAID)


def out_of_memory(error: BaseException, device: torch.device, what: str) -> OutOfCapacity:
    """What a caller is told when `what` did not fit: what torch says is needed and free, and which options help."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return OutOfCapacity(f"{what} does not fit into the memory of {device}: {said}; {REMEDY}", device=device)


def within_memory(compute: Callable[[], T], device: torch.device, what: str) -> T:
    """What `compute` returns; raises `OutOfCapacity` where `what` does not fit into memory, and releases it."""
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        full = out_of_memory(error, device, what)
    release_memory(device)
    raise full


def as_attn_error(error: Exception, device: torch.device, what: str) -> AttnError:
    """The error as callers get it: itself if it is one of ours, `OutOfCapacity` for memory, else `InternalError`."""
    if isinstance(error, AttnError):
        return error
    return out_of_memory(error, device, what) if is_out_of_memory(error) else InternalError(str(error))


def release_memory(device: torch.device) -> None:
    """Give back what torch holds on the device and nothing uses: free blocks of the wrong sizes do not add up.

    Call it outside `except`: what an error that is being handled passed through is still alive.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
