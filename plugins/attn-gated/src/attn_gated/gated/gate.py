"""The gate between attention and its output projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attn_core import Attend, AttentionInputs, InnerAttention
from attn_core.masking import wide
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": nn.functional.softplus}


class Gate(InnerAttention, nn.Module):
    """Multiplies each head's output by σ(x W_g) or softplus(x W_g); `gates` is their total number, one per head or one
    per element.

    Learned: `gate` (`nn.Linear` with Glorot uniform weights).
    """

    def __init__(self, hidden_size: int, *, heads: int, gates: int, bias: bool, activation: str) -> None:
        super().__init__()
        self.heads = heads
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Linear(hidden_size, gates, bias=bias)
        nn.init.xavier_uniform_(self.gate.weight)
        if self.gate.bias is not None:
            nn.init.zeros_(self.gate.bias)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Gated outputs [batch, query, heads, value_size]; the gates read the hidden states `rows` [batch, query,
        hidden_size]."""
        out = attend(operands)
        gates = self.activation(wide(self.gate(rows))).to(out.dtype)
        return out * torch.unflatten(gates, -1, (self.heads, -1))

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- the gate comes after
        """The softmax weights [batch, heads, query, key], before the gate."""
        return attend(operands)
