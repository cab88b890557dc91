"""The difference of two softmax maps, applied to the values, and the norm of the result."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from attn_core import Attend, AttentionInputs, InnerAttention
from torch import Tensor, nn

EPSILON = 1e-5
DEVIATION = 0.1


class Difference(InnerAttention, nn.Module):
    """Pairs of adjacent heads of `size` elements: (A₁ - λ A₂) V, normalised per pair and scaled by 1 - λ_init.

    Learned: `lambdas` [4, size] (λ_q1, λ_k1, λ_q2, λ_k2, drawn from N(0, 0.1²)) and `norm` (`nn.RMSNorm` of 2 size).
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("lambdas",)
    """Parameters of vectors, which are stored in two dimensions."""

    def __init__(self, size: int, *, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.lambdas = nn.Parameter(torch.randn(4, size) * DEVIATION)
        self.norm = nn.RMSNorm(2 * size, eps=EPSILON)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- as every inner one
        """Outputs [batch, query, heads / 2, 2 size]."""
        # The values of a pair are those of two heads concatenated; each half is computed by a separate attention.
        halves = operands.value[:, :, 0::2], operands.value[:, :, 1::2]
        read = [attend(dataclasses.replace(operands, value=half.repeat_interleave(2, dim=2))) for half in halves]
        both = torch.cat(read, dim=-1)
        first, second = both[:, :, 0::2], both[:, :, 1::2]
        normed: Tensor = self.norm(first - self.share().to(first.dtype) * second)
        return normed * (1 - self.initial)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- as every inner one
        """A₁ - λ A₂ [batch, heads / 2, query, key], before the norm; rows sum to 1 - λ."""
        both = attend(operands)
        return both[:, 0::2] - self.share().to(both.dtype) * both[:, 1::2]

    def share(self) -> Tensor:
        """λ, a scalar in at least float32."""
        q1, k1, q2, k2 = (self.lambdas if self.lambdas.dtype == torch.float64 else self.lambdas.float()).unbind(0)
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.initial
