"""The same without the scores of all pairs in memory: a bias of query and key as elements of both."""

from __future__ import annotations

import torch
from attn_core import AttentionInputs, Heads
from attn_core.masking import LOWEST, of_query_heads, wide
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def from_the_start(heads: Heads, operands: AttentionInputs, sums: Tensor) -> Tensor:
    """Outputs [batch, query, heads, value_size] of whole sequences.

    `sums` [batch, heads, key] are those of the gates' logarithms up to each token. Queries and keys carry them in three
    more elements, whose products are D, so that a fused kernel, which knows of no bias, computes all tile by tile,
    forward and backward.
    """
    # Whole parts cancel exactly however large the sums are, and come first, before anything small is added.
    whole = sums.detach().round()
    # What all scores of a query have in common changes nothing, so its own rest is left out.
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
    # Kernels are fused where queries, keys and values have one size.
    widest = max(query.shape[-1], heads.value_size)
    query, key, value = (pad(rows, (0, widest - rows.shape[-1])) for rows in (query, key, value))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)[..., : heads.value_size]
    if operands.key_padding_mask is not None:
        out = out.masked_fill(operands.key_padding_mask.cumsum(1)[:, None, :, None] == 0, 0.0)
    return out.transpose(1, 2).to(operands.value.dtype)
