"""The gated output of Show, Attend and Tell."""

from __future__ import annotations

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, InnerAttention
from torch import Tensor, nn

from attn_variants.reinforce import SamplingAttention


class GatedAttention(InnerAttention, nn.Module):
    """Attention whose output each head multiplies by β = σ(w x + b) of the query's input row x.

    Parameters: `gate` (`nn.Linear` from `hidden_size` to one gate per head, Xavier uniform, bias zero).
    """

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.gate = gate_projection(hidden_size, heads)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Gated outputs [batch, query_len, num_heads, value_dim] of input rows [batch, query_len, hidden_size]."""
        return attend(operands) * torch.sigmoid(self.gate(rows))[..., None]

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- the gate comes after
        """The attention weights [batch, num_heads, query_len, key_len], before the gate."""
        return attend(operands)


class GatedSamplingAttention(SamplingAttention):
    """`SamplingAttention` with the gate of `GatedAttention`: hard visual attention."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, *, expected: float) -> None:
        super().__init__(spec, expected=expected)
        self.gate = gate_projection(hidden_size, spec.heads.query)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Gated outputs [batch, query_len, num_heads, value_dim] of input rows [batch, query_len, hidden_size]."""
        return super().forward(rows, operands, attend) * torch.sigmoid(self.gate(rows))[..., None]


def gate_projection(hidden_size: int, heads: int) -> nn.Linear:
    """A linear layer to one gate per head, with Xavier-uniform weights and zero bias."""
    gate = nn.Linear(hidden_size, heads)
    nn.init.xavier_uniform_(gate.weight)
    nn.init.zeros_(gate.bias)
    return gate
