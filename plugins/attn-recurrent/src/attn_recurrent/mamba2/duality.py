"""State space duality: S_t = e^(g_t) S_{t-1} + B_t v_t^T, read as o_t = S_t^T C_t, with one decay g_t ≤ 0 per head.

Shapes: C and B [batch, groups, tokens, state_size], values v [batch, heads, tokens, head_dim], log decays g [batch,
heads, tokens, 1], memories S [batch, heads, state_size, head_dim]; heads of a group are consecutive.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attn_recurrent.sequences import faded, in_chunks


class System(NamedTuple):
    """The inputs of the recurrence at some tokens, in the shapes above: C (`reading`), B (`writing`), v and g."""

    reading: Tensor
    writing: Tensor
    value: Tensor
    decay: Tensor


def one_chunk(system: System, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and memory after one chunk of tokens (Dao & Gu 2024, arXiv 2405.21060, §6)."""
    group_size = system.value.shape[1] // system.reading.shape[1]
    total = system.decay.cumsum(2)
    last = total[:, :, -1:]
    reading = system.reading.repeat_interleave(group_size, dim=1) * total.exp()
    writing = system.writing.repeat_interleave(group_size, dim=1) * (last - total).exp()
    out = torch.matmul(weights(system), system.value) + torch.matmul(reading, memory)
    return out, memory * last.exp() + torch.matmul(writing.transpose(-1, -2), system.value)


by_chunks = partial(in_chunks, one_chunk)
"""`by_chunks(system, memory, chunk)`; see `in_chunks`."""


def weights(system: System) -> Tensor:
    """The weights of the values: C_i·B_j e^(total_i - total_j) for j ≤ i, else zero, [batch, heads, tokens, tokens]."""
    group_size = system.value.shape[1] // system.reading.shape[1]
    pairs = torch.matmul(system.reading, system.writing.transpose(-1, -2)).repeat_interleave(group_size, dim=1)
    return faded(pairs, system.decay.cumsum(2))
