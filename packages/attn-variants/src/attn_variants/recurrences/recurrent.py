"""A linear recurrence token by token: how it decodes, and the definition that the other forms must equal."""

from __future__ import annotations

import torch
from attn_core.kernels.recurrence import Steps
from torch import Tensor


def recurrent(steps: Steps, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs [batch, tokens, heads, value_size] and the memory [batch, heads, key_size, value_size] after them.

    `before` is the memory at the start, None for an empty one.
    """
    memory = steps.nothing() if before is None else before
    outs = []
    for token in range(steps.key.shape[1]):
        memory = updated(steps, token, memory)
        outs.append(read(memory, steps.query[:, token]))
    return torch.stack(outs, dim=1) if outs else steps.value[:, :0], memory


def updated(steps: Steps, token: int, memory: Tensor) -> Tensor:
    """The memory [batch, heads, key_size, value_size] after one token."""
    key, value = steps.key[:, token], steps.value[:, token]
    if steps.decay is not None:
        memory = memory * steps.decay[:, token].exp()[..., None]
    if steps.strength is not None:
        value = steps.strength[:, token, :, None] * (value - read(memory, key))
    return torch.addcmul(memory, key[..., None], value[..., None, :])


def read(memory: Tensor, query: Tensor) -> Tensor:
    """What queries [batch, heads, key_size] read, [batch, heads, value_size]."""
    return torch.matmul(query[..., None, :], memory)[..., 0, :]
