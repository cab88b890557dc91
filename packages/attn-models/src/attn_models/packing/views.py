"""Linear layers over memory that is there already."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer over this memory."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer
