"""The tensors of a recurrence: those it is given, and those that its programs leave one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attn_kernels_triton.kernels.arguments import NO_ROWS, Rows
from attn_kernels_triton.scan.tiles import ScanSizes


class Given(NamedTuple):
    """Steps and the memory before them, every last axis dense."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    strength: Tensor | None
    before: Tensor | None

    @property
    def sizes(self) -> ScanSizes:
        """Of what kind they are."""
        channels = self.decay is not None and self.decay.shape[-1] > 1
        return ScanSizes(self.key.dtype, self.key.shape[3], self.value.shape[3], self.key.shape[1], channels)

    def rows(self, size: int) -> Tensor:
        """Fresh memory [batch, tokens, heads, size] in the type of the steps."""
        return torch.empty(*self.key.shape[:3], size, dtype=self.key.dtype, device=self.key.device)

    def memory(self) -> Tensor:
        """Fresh memory [batch, heads, key_size, value_size], float32."""
        batch, _, heads, size = self.key.shape
        return torch.empty(batch, heads, size, self.value.shape[3], dtype=torch.float32, device=self.key.device)

    def states(self) -> Tensor:
        """Fresh memory [batch, heads, chunks · key_size, value_size] in the type of the steps."""
        batch, tokens, heads, size = self.key.shape
        cells = -(-tokens // self.sizes.chunk) * size
        return torch.empty(batch, heads, cells, self.value.shape[3], dtype=self.key.dtype, device=self.key.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Between:
    """What programs leave one another, and the results; see `programs.scan.arguments.Scan`."""

    faded: Tensor | None
    solved: Tensor | None
    told: Tensor | None
    inverse: Tensor | None
    news: Tensor | None
    states: Tensor
    after: Tensor
    out: Tensor


def between(given: Given) -> Between:
    """Fresh memory for all of it."""
    corrects, sizes = given.strength is not None, given.sizes
    faded = None
    if given.decay is not None:
        faded = torch.empty_like(given.decay, dtype=torch.float32, memory_format=torch.contiguous_format)
        faded = faded if sizes.channels else spaced(faded)
    return Between(
        faded=faded,
        solved=given.rows(sizes.value_size) if corrects else None,
        told=given.rows(sizes.key_size) if corrects else None,
        inverse=given.rows(sizes.chunk) if corrects else None,
        news=given.rows(sizes.value_size) if corrects else None,
        states=given.states(),
        after=given.memory(),
        out=given.rows(sizes.value_size),
    )


def by_token(tensor: Tensor | None) -> Rows:
    """The view of a tensor [batch or 1, token, head, size], `NO_ROWS` for None."""
    if tensor is None:
        return NO_ROWS
    batch, row, head = tensor.stride()[:3]
    return Rows(tensor, 0 if tensor.shape[0] == 1 else batch, row, head)


def by_channel(tensor: Tensor | None) -> Rows:
    """The view of a tensor [batch, head, channel, size], `NO_ROWS` for None."""
    if tensor is None:
        return NO_ROWS
    batch, head, row, _ = tensor.stride()
    return Rows(tensor, batch, row, head)


def spaced(tensor: Tensor) -> Tensor:
    """One number a head, [batch, tokens, heads, 1], copied so that heads lie two elements apart.

    A stride of 1 is a constant to Triton, and 3.6 loses constants of tuples inside of loops.
    """
    wide = tensor.new_empty(*tensor.shape[:3], 2)
    wide[..., :1] = tensor
    return wide[..., :1]
