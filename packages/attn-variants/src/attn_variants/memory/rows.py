"""What layers that learn by themselves share: fresh weights and inputs that are refused."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn


def drawn(*shape: int) -> nn.Parameter:
    """Weights [heads, into, out], uniform by Glorot's rule for each head, or vectors [heads, size] in ±1/√size."""
    bound = (6 / (shape[-2] + shape[-1])) ** 0.5 if len(shape) > 2 else shape[-1] ** -0.5
    return nn.Parameter((torch.rand(shape) * 2 - 1) * bound)


def refuse_source(source: Tensor | None, mechanism: str) -> None:
    """Raise `InvalidValue` where a source is given to a mechanism that reads one sequence."""
    if source is not None:
        raise InvalidValue.of("source", tuple(source.shape), f"None: mechanism {mechanism!r} reads one sequence")
