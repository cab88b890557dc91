"""α-entmax with the gradients derived in its papers."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.first_order import first_order_only
from torch import Tensor


def entmax(energies: Tensor, allowed: Tensor, alpha: Tensor) -> Tensor:
    """α-entmax, [(α-1) e - τ]₊^(1/(α-1)), of scores [..., key] over the allowed keys; α broadcasts with [..., 1]."""
    weights: Tensor = _Entmax.apply(energies, allowed, alpha)  # type: ignore[no-untyped-call]
    return weights


class _Entmax(torch.autograd.Function):
    """The threshold by bisection; the gradients of Peters et al. 2019 (section 3.3) and Correia et al. 2019 (eq. 8)."""

    @staticmethod
    def forward(ctx: Any, energies: Tensor, allowed: Tensor, alpha: Tensor) -> Tensor:
        some = allowed.any(-1, keepdim=True)
        lowest = max(-1e6, torch.finfo(energies.dtype).min / 64)  # float16 ends at 65504
        scaled = (energies * (alpha - 1)).masked_fill(~allowed & some, lowest)
        high = scaled.amax(-1, keepdim=True)
        low = high - 1
        for _ in range(60):
            middle = (low + high) / 2
            more = ((scaled - middle).clamp(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) > 1
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        weights: Tensor = (scaled - low).clamp(min=0) ** (1 / (alpha - 1)) * some * allowed
        ctx.save_for_backward(weights, alpha)
        return weights

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, Tensor]:
        weights, alpha = ctx.saved_tensors
        support = weights > 0
        slopes = torch.where(support, weights.clamp(min=1e-300) ** (2 - alpha), 0.0)
        share = slopes / slopes.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        to_energies = slopes * (upstream - (share * upstream).sum(-1, keepdim=True))
        entropy = -torch.special.xlogy(weights, weights)
        shape = (weights - share) / (alpha - 1) ** 2
        shape = shape + (entropy - share * entropy.sum(-1, keepdim=True)) / (alpha - 1)
        shape = torch.where(support, shape, 0.0)
        return to_energies, None, (upstream * shape).sum_to_size(alpha.shape)
