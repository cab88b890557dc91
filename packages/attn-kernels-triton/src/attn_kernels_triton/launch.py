"""Launching Triton kernels, and helpers that describe tensors to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from attn_kernels_triton.kernels.arguments import Rows

LARGEST_OFFSET = 2**31 - 1
"""The largest offset that fits 32 bits: kernels use 32-bit offsets within a head, 64-bit ones for heads and batches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """A kernel launch: the Triton kernel, its grid size (`programs`), its argument, and its compile options.

    `tiles` are TMA descriptors that are passed as further arguments. `scratch` is set for kernels that create such
    descriptors on the device and so need an allocator for them.
    """

    program: Any
    programs: int
    call: Any
    warps: int
    stages: int
    tiles: tuple[Any, ...] = ()
    scratch: bool = False

    def run(self, device: torch.device) -> None:
        """Launch the kernel on a device; an empty grid is not launched."""
        if not self.programs:
            return
        if self.scratch:
            triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device=device))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.program[(self.programs,)](self.call, *self.tiles, num_warps=self.warps, num_stages=self.stages)


_warm: set[tuple[Hashable, ...]] = set()


def warm_up_backward(given: Sequence[Tensor | None], kind: tuple[Hashable, ...], compute: Callable[[], object]) -> None:
    """Run a backward pass once, over arbitrary values, the first time that a call of this kind needs gradients.

    Call it before the forward pass. A backward kernel that this GPU cannot compile then fails where dispatch can still
    choose the next kernel, see `attn_core.kernels.dispatch.Operation.run`, rather than when a loss is differentiated.
    Gradients flow to `given`, whose first entry is not None. `kind` is the name of the backward pass and everything
    that its kernels are specialized on; `compute` launches them. Subclasses of tensors (such as fake ones) are skipped.
    """
    first = given[0]
    if not torch.is_grad_enabled() or first is None or type(first) not in {Tensor, torch.nn.Parameter}:
        return
    kind = (*kind, first.device)
    if kind in _warm or not any(part is not None and part.requires_grad for part in given):
        return
    with torch.no_grad():
        compute()
    _warm.add(kind)


def specialized(number: int | None) -> tuple[bool, ...]:
    """What Triton specializes a kernel on for an integer: whether it is given, is 1, and is a multiple of 16."""
    return (False,) if number is None else (True, number == 1, number % 16 == 0)


def laid(*tensors: Tensor | None) -> tuple[object, ...]:
    """What Triton specializes a kernel on for the layout of tensors: whether the first element is aligned to 16 bytes,
    and for each stride whether it is 1 and whether it is a multiple of 16."""
    return tuple(
        None
        if tensor is None
        else (
            tensor.storage_offset() * tensor.itemsize % 16 == 0,
            *((step == 1, step % 16 == 0) for step in tensor.stride()),
        )
        for tensor in tensors
    )


def laid_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in a layout that kernels compiled for the contiguous tensor `like`, of the same shape, accept.

    A contiguous copy if another specialization would be compiled or if offsets exceed 32 bits, else the tensor itself.
    """
    near = all(size * step <= LARGEST_OFFSET for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    return tensor if near and laid(tensor) == laid(like) else tensor.contiguous().view(-1).view(like.shape)


def rows(tensor: Tensor) -> Rows:
    """The kernel argument for a tensor [batch, row, head, size]: its data and strides."""
    batch, row, head, _ = tensor.stride()
    return Rows(tensor, batch, row, head)


def addressable(tensor: Tensor) -> Tensor:
    """A tensor [batch, row, head, size] that kernels can address: a copy if its last axis is not contiguous or its
    offsets exceed 32 bits."""
    dense = tensor.stride(3) == 1 or tensor.shape[3] == 1
    return tensor if dense and tensor.shape[1] * tensor.stride(1) <= LARGEST_OFFSET else tensor.contiguous()


def integers(found: Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """The integers as an int32 tensor on the device of `like`."""
    return torch.tensor(found, dtype=torch.int32, device=like.device)


USUAL = 132
"""The number of multiprocessors of an H200, which is assumed where there is no GPU."""


@cache
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors of a device."""
    if device.type != "cuda":
        return USUAL
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size` and at least 16, the smallest dimension of a matrix product."""
    return max(16, 1 << (size - 1).bit_length())
