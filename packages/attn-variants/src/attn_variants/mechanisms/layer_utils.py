"""Building blocks that the layers of computed mechanisms share: initialisation, norms and argument checks."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
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


def drawn(*shape: int) -> nn.Parameter:
    """Weights [heads, into, out], uniform by Glorot's rule for each head, or vectors [heads, size] in ±1/√size."""
    bound = (6 / (shape[-2] + shape[-1])) ** 0.5 if len(shape) > 2 else shape[-1] ** -0.5
    return nn.Parameter((torch.rand(shape) * 2 - 1) * bound)


def refuse_source(source: Tensor | None) -> None:
    """Raise `InvalidValue` where a source is given to a layer of self-attention."""
    if source is not None:
        raise InvalidValue.of("source", tuple(source.shape), "None: this layer attends within one sequence")


def softmax_over(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Weights over the last axis; zeros, and no gradient, where nothing is allowed.

    `allowed` broadcasts with the scores, True keeps.
    """
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    lowest = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(~allowed, lowest), dim=-1).masked_fill(~allowed, 0.0)
