"""Longformer's global tokens, which attend with projections of their own."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import AttentionInputs, AttentionSpec, Full, InnerAttention
from attn_core.mechanism import Attend
from torch import Tensor, nn

from attn_variants.compute.plain import attention_weights
from attn_variants.plan import KernelPlan

GLOBAL_OFFSET = 1
"""Offset of the random numbers for dropout of the global rows, so that they differ from those of local rows."""


class GlobalAttention(nn.Module, InnerAttention):
    """Replaces the outputs at global positions by attention to all tokens with other projections.

    Learned: `query`, `key`, `value` (`nn.Linear` of inputs of `hidden_size`, uniform by Glorot's rule, biases zero). A
    model that gets global tokens after its training starts them as copies of the layer's own (Beltagy et al. 2020).
    """

    def __init__(self, spec: AttentionSpec, positions: tuple[int, ...], *, hidden_size: int, bias: bool) -> None:
        super().__init__()
        heads = spec.heads
        self.spec = dataclasses.replace(spec, mask=Full())
        self.positions = positions
        self.query = nn.Linear(hidden_size, heads.query * heads.key_size, bias=bias)
        self.key = nn.Linear(hidden_size, heads.key_value * heads.key_size, bias=bias)
        self.value = nn.Linear(hidden_size, heads.key_value * heads.value_size, bias=bias)
        for linear in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self._plan = KernelPlan(self.spec)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size] for rows [batch, query, hidden_size]."""
        local = attend(operands)
        at = self.global_positions(rows)
        if not at:
            return local
        seen = self._plan.run(self.global_operands(rows, operands, at))
        return local.index_copy(1, torch.tensor(at, device=rows.device), seen.to(local.dtype))

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Weights [batch, heads, query, key]; those of global rows are over the global projections."""
        local = attend(operands)
        at = self.global_positions(rows)
        if not at:
            return local
        seen = attention_weights(self.spec, self.global_operands(rows, operands, at))
        return local.index_copy(2, torch.tensor(at, device=rows.device), seen)

    def global_positions(self, rows: Tensor) -> list[int]:
        """The global positions within the sequence."""
        return [position for position in self.positions if position < rows.shape[1]]

    def global_operands(self, rows: Tensor, operands: AttentionInputs, at: list[int]) -> AttentionInputs:
        """Global queries [batch, global, heads, size] over global keys and values of all rows."""
        heads = self.spec.heads
        return AttentionInputs(
            query=self.query(rows[:, at]).unflatten(-1, (heads.query, heads.key_size)),
            key=self.key(rows).unflatten(-1, (heads.key_value, heads.key_size)),
            value=self.value(rows).unflatten(-1, (heads.key_value, heads.value_size)),
            key_padding_mask=operands.key_padding_mask,
            dropout=operands.dropout and dataclasses.replace(operands.dropout, offset=GLOBAL_OFFSET),
        )
