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


def one_chunk(rule: Rule, memory: Tensor, *, before: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs and memory after one chunk of tokens, in the WY form (Yang et al. 2024, arXiv 2412.06464, §3.3).

    With `before` a key reads the memory before it decays, S_{t-1}, and not S'.
    """
    total = rule.decay.cumsum(2)
    seen = total - rule.decay if before else total
    early, size = total.exp(), rule.value.shape[-1]
    right_side = rule.strength * torch.cat([rule.value, rule.key * seen.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(overlap(rule, total, seen), right_side, upper=False, unitriangular=True)
    values = solved[..., :size] - torch.matmul(solved[..., size:], memory)
    out = torch.matmul(faded_pairs(rule.query, rule.key, total), values) + torch.matmul(rule.query * early, memory)
    last = total[:, :, -1:]
    late = rule.key * (last - total).exp()
    return out, memory * last.exp() + torch.matmul(late.transpose(-1, -2), values)


by_chunks = partial(in_chunks, one_chunk)
"""`by_chunks(rule, memory, chunk)`; see `in_chunks`."""


def weights(rule: Rule, *, before: bool = False) -> Tensor:
    """The effective weights [batch, heads, query, key] of the values in the outputs; `before` as of `one_chunk`."""
    total = rule.decay.cumsum(2)
    seen = total - rule.decay if before else total
    reach = faded_pairs(rule.query, rule.key, total)
    solved: Tensor = torch.linalg.solve_triangular(
        overlap(rule, total, seen), reach, upper=False, left=False, unitriangular=True
    )
    return solved * rule.strength.transpose(-1, -2)


def overlap(rule: Rule, total: Tensor, seen: Tensor) -> Tensor:
    """The products of each key, times its strength, with earlier keys, [batch, heads, tokens, tokens], that have
    decayed when it reads them; `seen` is the sum of log decays by then."""
    return rule.strength * faded(torch.matmul(rule.key, rule.key.transpose(-1, -2)), total, seen, reach=-1)


def faded_pairs(query: Tensor, key: Tensor, total: Tensor) -> Tensor:
    """The decayed products q_i·k_j e^(total_i - total_j) for j ≤ i, else zero, [batch, heads, tokens, tokens]."""
    return faded(torch.matmul(query, key.transpose(-1, -2)), total)
