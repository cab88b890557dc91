"""Starting programs."""

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
"""The largest number that programs hold in 32 bits: rows of one head are counted so, heads and sequences in 64."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """A program, how many of it, its argument, and the options with which it is compiled.

    `tiles` are descriptors of tensors whose tiles the chip copies by itself; programs that make such descriptors
    themselves need memory to hold them, `scratch`.
    """

    program: Any
    programs: int
    call: Any
    warps: int
    stages: int
    tiles: tuple[Any, ...] = ()
    scratch: bool = False

    def run(self, device: torch.device) -> None:
        """Start the programs on a device; nothing is started where there are none."""
        if not self.programs:
            return
        if self.scratch:
            triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device=device))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.program[(self.programs,)](self.call, *self.tiles, num_warps=self.warps, num_stages=self.stages)


_warm: set[tuple[Hashable, ...]] = set()


def warm_up_backward(given: Sequence[Tensor | None], kind: tuple[Hashable, ...], compute: Callable[[], object]) -> None:
    """Run a backward pass of a call, over any numbers, the first time that one of this kind needs gradients.

    To be called before the forward pass; gradients flow to `given`, of which the first is there. So what a chip
    cannot compile fails where the next kernel can take its place, see `attn_core.kernels.dispatch.KernelTable.run`,
    and before anything is saved, not when a loss is differentiated. `kind` is the name of the backward pass and all by
    which its programs are compiled apart; `compute` launches them. Tensors that only stand for others are left out.
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
    """What of a number Triton compiles into a program: whether it is given, is 1, and is a multiple of 16."""
    return (False,) if number is None else (True, number == 1, number % 16 == 0)


def laid(*tensors: Tensor | None) -> tuple[object, ...]:
    """What Triton compiles into a program of how tensors lie in memory: of their strides, whether each is 1 and is a
    multiple of 16, and whether the first element is aligned."""
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
    """A tensor of the shape of a dense one, as the programs that were compiled for that one take it: a dense copy where
    others would have to be compiled, or rows lie too far apart."""
    near = all(size * step <= LARGEST_OFFSET for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    return tensor if near and laid(tensor) == laid(like) else tensor.contiguous().view(-1).view(like.shape)


def rows(tensor: Tensor) -> Rows:
    """The view of a tensor [batch, row, head, size]."""
    batch, row, head, _ = tensor.stride()
    return Rows(tensor, batch, row, head)


def addressable(tensor: Tensor) -> Tensor:
    """A tensor [batch, row, head, size] that programs can walk over: a copy where it is not dense, or rows lie too far
    apart."""
    dense = tensor.stride(3) == 1 or tensor.shape[3] == 1
    return tensor if dense and tensor.shape[1] * tensor.stride(1) <= LARGEST_OFFSET else tensor.contiguous()


def integers(found: Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """The numbers, int32, on the device of a tensor."""
    return torch.tensor(found, dtype=torch.int32, device=like.device)


USUAL = 132
"""Processors of an H200, which stand for those of chips that are only compiled for."""


@cache
def processors(device: torch.device) -> int:
    """How many processors a device has."""
    if device.type != "cuda":
        return USUAL
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(size: int) -> int:
    """The least power of two that is not smaller than a size and than 16, below which no matrix unit goes."""
    return max(16, 1 << (size - 1).bit_length())
