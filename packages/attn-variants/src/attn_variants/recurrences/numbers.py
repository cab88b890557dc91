"""Small functions on rows that several recurrences share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_variants.compute.norm import norm_kernel


def unit(rows: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Rows [..., size] of length one; zeros stay zeros, for `epsilon` is added to the squared length."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + epsilon)


def rms_normed(rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Rows [..., size] of root mean square one, times `weight` [size] if given (Zhang & Sennrich 2019)."""
    kernel = norm_kernel(rows, weight)
    if kernel is not None:
        return kernel.norm(rows, weight, epsilon)
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return normed if weight is None else normed * weight.to(rows.dtype)


def by_heads(rows: Tensor, heads: int) -> Tensor:
    """Rows [..., heads · size] as [..., heads, size]."""
    return rows.reshape(*rows.shape[:-1], heads, rows.shape[-1] // heads)


def fresh_linear(into: int, out: int, *, bias: bool) -> nn.Linear:
    """A linear layer drawn uniformly by Glorot's rule, its biases zero."""
    linear = nn.Linear(into, out, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def multiplied_in(rows: Tensor) -> torch.dtype:
    """The type in which linear layers multiply rows: autocast's, or their own."""
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
