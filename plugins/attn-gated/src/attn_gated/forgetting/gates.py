"""Forget gates, and softmax attention with their bias."""

from __future__ import annotations

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, Fields, Heads, InnerAttention
from attn_core.kernels.base import batch_invariant
from attn_core.masking import LOWEST, allowed_pairs, of_query_heads, positions, shares, wide
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, scaled_dot_product_attention


def from_the_start(heads: Heads, operands: AttentionInputs, sums: Tensor) -> Tensor:
    """Outputs [batch, query, heads, value_size] of whole sequences.

    `sums` [batch, heads, key] are the sums of the gates' logarithms up to each token. Queries and keys get three more
    elements, whose products add up to the bias D, so that a fused kernel without support for biases computes forward
    and backward passes tile by tile.
    """
    # Integer parts cancel exactly, however large the sums are; they are first, so that they are summed first.
    whole = sums.detach().round()
    # The fractional part of the query's own sum is left out, as a term that all scores of a query share has no effect.
    rest = (
        whole - sums
        if operands.key_padding_mask is None
        else (whole - sums).masked_fill(~operands.key_padding_mask[:, None], LOWEST)
    )
    one = torch.ones_like(sums)
    query = wide(operands.query).transpose(1, 2) * heads.key_size**-0.5
    key, value = (of_query_heads(heads, wide(rows).transpose(1, 2)) for rows in (operands.key, operands.value))
    query = torch.cat([torch.stack([whole, one, one], -1).to(query), query], -1)
    key = torch.cat([torch.stack([one, -whole, rest], -1).to(key), key], -1)
    # torch uses fused kernels only if queries, keys and values have the same size.
    widest = max(query.shape[-1], heads.value_size)
    query, key, value = (pad(rows, (0, widest - rows.shape[-1])) for rows in (query, key, value))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)[..., : heads.value_size]
    if operands.key_padding_mask is not None:
        out = out.masked_fill(operands.key_padding_mask.cumsum(1)[:, None, :, None] == 0, 0.0)
    return out.transpose(1, 2).to(operands.value.dtype)


class ForgetGates(InnerAttention, nn.Module):
    """Softmax attention that adds to each score the log f of every token after the key, up to the query's own.

    Learned: `gate` (`nn.Linear` from `hidden_size` to one gate per head, with Glorot uniform weights and zero bias).
    """

    computes_itself = True

    def __init__(self, spec: AttentionSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = nn.Linear(hidden_size, spec.heads.query)
        nn.init.xavier_uniform_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def remember(self, rows: Tensor, positions: Tensor) -> Fields:  # noqa: ARG002 -- the same everywhere
        """The field "gate": log f [..., heads] of hidden states [..., hidden_size], at least float32."""
        return {"gate": logsigmoid(wide(self.gate(rows)))}

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]."""
        has_positions = operands.query_positions is not None or operands.key_positions is not None
        if not has_positions and operands.query.shape[1] == operands.key.shape[1] and not batch_invariant():
            return from_the_start(self.spec.heads, operands, gate_sums(operands))
        value = of_query_heads(self.spec.heads, wide(operands.value).transpose(1, 2))
        out = self.weights(rows, operands, attend) @ value
        return out.transpose(1, 2).to(operands.value.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Attention weights [batch, heads, query, key]."""
        heads = self.spec.heads
        query = wide(operands.query).transpose(1, 2) * heads.key_size**-0.5
        key = of_query_heads(heads, wide(operands.key).transpose(1, 2))
        return shares(
            query @ key.transpose(-1, -2) + forgotten(operands).to(query), allowed_pairs(self.spec.mask, operands)
        )


def forgotten(operands: AttentionInputs) -> Tensor:
    """The bias D [batch, heads, query, key], float64: the sums of log f from the token after the key to the query.

    Keys are at positions 0, 1, ... Padding counts as log f = 0. Above the diagonal D is undefined.
    """
    sums = gate_sums(operands)
    places = positions(operands)[0][:, None].expand(*sums.shape[:2], -1)
    return sums.gather(2, places)[..., None] - sums[:, :, None, :]


def gate_sums(operands: AttentionInputs) -> Tensor:
    """The sums c [batch, heads, key], float64, of log f up to each key. Padding counts as log f = 0."""
    gates = operands.fields["gate"].double()
    if operands.key_padding_mask is not None:
        gates = gates.masked_fill(~operands.key_padding_mask[..., None], 0.0)
    return gates.cumsum(1).transpose(1, 2)
