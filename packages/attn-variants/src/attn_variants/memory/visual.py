"""Gated soft attention, and hard attention that samples while it learns."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import Attend, AttentionSpec, InnerAttention, Operands
from attn_core.distributions import Softmax
from attn_core.masking import of_query_heads, wide
from torch import Tensor, nn

from attn_variants.compute.plain import attention_weights
from attn_variants.memory.reinforce import Glimpses


class Gated(InnerAttention, nn.Module):
    """Multiplies what each head sees by β = σ(w x + b) of the query's row.

    Learned: `gate` (`nn.Linear` to one gate a head, uniform by Glorot's rule).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, heads)
        nn.init.xavier_uniform_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, rows: Tensor, operands: Operands, attend: Attend) -> Tensor:
        """Gated outputs [batch, query, heads, value_size] of rows [batch, query, width]."""
        return attend(operands) * torch.sigmoid(self.gate(rows))[..., None]

    def weights(self, rows: Tensor, operands: Operands, attend: Attend) -> Tensor:  # noqa: ARG002 -- the gate comes after
        """The weights [batch, heads, query, key], before the gate."""
        return attend(operands)


class Glimpse(Gated):
    """`Gated` around a hard distribution, `spec`: in evaluation the likeliest key; in training one drawn from the
    softmax, but in a share `mean_rate` of the calls the soft mean of all, which lowers the variance (Xu et al. 2015,
    section 4.1).

    `glimpses` are those of the last call that drew, None after one that did not.
    """

    def __init__(self, spec: AttentionSpec, width: int, *, mean_rate: float) -> None:
        super().__init__(width, spec.heads.query)
        self.soft = dataclasses.replace(spec, distribution=Softmax())
        self.mean_rate = mean_rate
        self.glimpses: Glimpses | None = None

    def forward(self, rows: Tensor, operands: Operands, attend: Attend) -> Tensor:
        """Gated outputs [batch, query, heads, value_size] of rows [batch, query, width]."""
        if not self.training:
            return super().forward(rows, operands, attend)
        shares = attention_weights(self.soft, operands)
        if torch.rand(()) < self.mean_rate:
            self.glimpses, seen = None, shares
        else:
            self.glimpses, seen = sample(shares)
        value = of_query_heads(self.soft.heads, wide(operands.value).transpose(1, 2))
        out = (seen @ value).transpose(1, 2).to(operands.value.dtype)
        return out * torch.sigmoid(self.gate(rows))[..., None]


def sample(shares: Tensor) -> tuple[Glimpses, Tensor]:
    """One key a query drawn from shares [batch, heads, query, key], and the same as ones and zeros of that shape.

    Keys without a share are never drawn; a query without any key sees none.
    """
    some = shares.detach().sum(-1) > 0
    # A query that may see nothing must still be given something to draw from; it is forgotten below.
    weights = shares.detach().masked_fill(~some[..., None], 1.0)
    drawn = torch.multinomial(weights.flatten(0, -2), 1).view(*shares.shape[:-1], 1)
    seen = torch.zeros_like(shares).scatter(-1, drawn, 1.0) * some[..., None]
    chances = shares.gather(-1, drawn)[..., 0].masked_fill(~some, 1.0)
    logarithms = shares.masked_fill(shares == 0, 1.0).log()
    return Glimpses(log_chance=chances.log(), entropy=-(shares * logarithms).sum(-1)), seen
