"""Handling of out-of-memory errors: recognizing them, reporting them to callers, and releasing cached memory.

A step needs memory beyond the weights and the cache, which are allocated when a model is loaded. If there is too
little, each request of the step is computed alone; one that does not fit even alone ends with `OutOfCapacity`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from attn_core.errors import AttnError, InternalError, OutOfCapacity

T = TypeVar("T")

MESSAGES = ("out of memory", "can't allocate memory")
"""Messages of torch's allocators that raise no specific exception class: MPS and the CPU."""
REMEDY = (
    "reduce the tokens of a step (--max-num-batched-tokens), the number of sequences (--max-num-seqs) or the size of "
    "the KV cache (--gpu-memory-utilization, --kv-cache-memory-bytes)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory of a device or of the host could not be allocated."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MESSAGES)


def out_of_memory(error: BaseException, device: torch.device, what: str) -> OutOfCapacity:
    """The error for a caller when `what` did not fit into memory: torch's message, and the options that help."""
    message = " ".join(str(error).split())[:300] or type(error).__name__
    return OutOfCapacity(f"{what} does not fit into the memory of {device}: {message}; {REMEDY}", device=device)


def within_memory(compute: Callable[[], T], device: torch.device, what: str) -> T:
    """Return `compute()`; if `what` does not fit into memory, release cached memory and raise `OutOfCapacity`."""
    try:
        return compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        full = out_of_memory(error, device, what)
    release_memory(device)
    raise full


def as_attn_error(error: Exception, device: torch.device, what: str) -> AttnError:
    """Convert an error for callers: an `AttnError` is unchanged, out of memory is `OutOfCapacity`, else
    `InternalError`."""
    if isinstance(error, AttnError):
        return error
    return out_of_memory(error, device, what) if is_out_of_memory(error) else InternalError(str(error))


def release_memory(device: torch.device) -> None:
    """Release torch's unused cached memory on the device, as free blocks of the wrong sizes cannot be combined.

    Call it outside `except` blocks: the traceback of an error that is being handled keeps tensors alive.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
