"""The difference of two softmax maps, applied to the values, and the norm of the result."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from attn_core import Attend, AttentionInputs, InnerAttention
from torch import Tensor, nn

DEVIATION = 0.1


class Difference(InnerAttention, nn.Module):
    """Pairs of heads of `size` elements: (A₁ - λ A₂) V, normalised per pair and scaled by 1 - λ_init.

    The heads of a pair are neighbours or, with `halves`, half of the heads apart, and so are those of its values.

    Learned: `lambdas` [4, size] (λ_q1, λ_k1, λ_q2, λ_k2, drawn from N(0, 0.1²)) and `norm` (`nn.RMSNorm` of 2 size).
    """

    reads_rows = False
    no_weight_decay: ClassVar[tuple[str, ...]] = ("lambdas",)
    """Parameters of vectors, which are stored in two dimensions."""

    def __init__(self, size: int, *, initial: float, halves: bool, eps: float) -> None:
        super().__init__()
        self.halves = halves
        self.initial = initial
        self.lambdas = nn.Parameter(torch.randn(4, size) * DEVIATION)
        self.norm = nn.RMSNorm(2 * size, eps=eps)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- as every inner one
        """Outputs [batch, query, heads / 2, 2 size]."""
        # The values of a pair are those of two heads concatenated; each half is computed by a separate attention.
        read = [attend(dataclasses.replace(operands, value=value)) for value in self._values(operands.value)]
        first, second = self._pair(torch.cat(read, dim=-1), 2)
        normed: Tensor = self.norm(first - self.share().to(first.dtype) * second)
        return normed * (1 - self.initial)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- as every inner one
        """A₁ - λ A₂ [batch, heads / 2, query, key], before the norm; rows sum to 1 - λ."""
        first, second = self._pair(attend(operands), 1)
        return first - self.share().to(first.dtype) * second

    def _pair(self, heads: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """The first and the second heads of all pairs, from `heads` along `axis`."""
        shape = (2, -1) if self.halves else (-1, 2)
        first, second = torch.unflatten(heads, axis, shape).unbind(axis if self.halves else axis + 1)
        return first, second

    def _values(self, value: Tensor) -> list[Tensor]:
        """For every key/value head of `value` [batch, key, heads, size] the values of the first head of its pair, and
        those of the second."""
        pair = self._pair(value, 2)
        return [half.repeat(1, 1, 2, 1) if self.halves else half.repeat_interleave(2, dim=2) for half in pair]

    def share(self) -> Tensor:
        """λ, a scalar in at least float32."""
        q1, k1, q2, k2 = (self.lambdas if self.lambdas.dtype == torch.float64 else self.lambdas.float()).unbind(0)
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.initial
