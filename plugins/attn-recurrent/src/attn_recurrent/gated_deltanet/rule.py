"""The gated delta rule: S_t = S' + β_t k_t (v_t - S'^T k_t)^T with S' = e^(g_t) S_{t-1}, read as o_t = S_t^T q_t.

Shapes: queries and keys [batch, heads, tokens, key_size], values [batch, heads, tokens, value_size], log decays g, at
most 0, and strengths β [batch, heads, tokens, 1], memories S [batch, heads, key_size, value_size].
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attn_recurrent.sequences import faded, in_chunks


class Rule(NamedTuple):
    """The inputs of the rule at some tokens, in the shapes above."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor


def one_chunk(rule: Rule, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and memory after one chunk of tokens, in the WY form (Yang et al. 2024, arXiv 2412.06464, §3.3)."""
    total = rule.decay.cumsum(2)
    early, size = total.exp(), rule.value.shape[-1]
    right_side = rule.strength * torch.cat([rule.value, rule.key * early], dim=-1)
    solved = torch.linalg.solve_triangular(overlap(rule, total), right_side, upper=False, unitriangular=True)
    values = solved[..., :size] - torch.matmul(solved[..., size:], memory)
    out = torch.matmul(faded_pairs(rule.query, rule.key, total), values) + torch.matmul(rule.query * early, memory)
    last = total[:, :, -1:]
    late = rule.key * (last - total).exp()
    return out, memory * last.exp() + torch.matmul(late.transpose(-1, -2), values)


by_chunks = partial(in_chunks, one_chunk)
"""`by_chunks(rule, memory, chunk)`; see `in_chunks`."""


def weights(rule: Rule) -> Tensor:
    """The effective weights [batch, heads, query, key] of the values in the outputs."""
    total = rule.decay.cumsum(2)
    reach = faded_pairs(rule.query, rule.key, total)
    solved: Tensor = torch.linalg.solve_triangular(
        overlap(rule, total), reach, upper=False, left=False, unitriangular=True
    )
    return solved * rule.strength.transpose(-1, -2)


def overlap(rule: Rule, total: Tensor) -> Tensor:
    """The decayed products of each key, times its strength, with earlier keys, [batch, heads, tokens, tokens]."""
    return (rule.strength * faded_pairs(rule.key, rule.key, total)).tril(-1)


def faded_pairs(query: Tensor, key: Tensor, total: Tensor) -> Tensor:
    """The decayed products q_i·k_j e^(total_i - total_j) for j ≤ i, else zero, [batch, heads, tokens, tokens]."""
    return faded(torch.matmul(query, key.transpose(-1, -2)), total)
