"""Starting programs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_kernels_triton.programs.arguments import Rows

WIDEST_GRID = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """A program, how many of it, its argument, and the options with which it is compiled."""

    program: Any
    programs: int
    call: Any
    warps: int
    stages: int

    def run(self, device: torch.device) -> None:
        """Start the programs on a device; nothing is started where there are none."""
        if not self.programs:
            return
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.program[(self.programs,)](self.call, num_warps=self.warps, num_stages=self.stages)


def rows(tensor: Tensor) -> Rows:
    """The view of a tensor [batch, row, head, size]."""
    batch, row, head, _ = tensor.stride()
    return Rows(tensor, batch, row, head)


def power_of_two(size: int) -> int:
    """The least power of two that is not smaller than a size and than 16, below which no matrix unit goes."""
    return max(16, 1 << (size - 1).bit_length())
