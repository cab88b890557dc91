"""The gated delta rule: S_t = S' + β_t k_t (v_t - S'^T k_t)^T with S' = e^(g_t) S_{t-1}, read as o_t = S_t^T q_t.

Shapes: queries and keys [batch, heads, tokens, key_size], values [batch, heads, tokens, value_size], log decays g, at
most 0, and strengths β [batch, heads, tokens, 1], memories S [batch, heads, key_size, value_size].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core.decays import decayed_pairs
from torch import Tensor

from attn_recurrent.sequences import faded, in_chunks


class Rule(NamedTuple):
    """The inputs of the rule at some tokens, in the shapes above."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor

    def writes(self) -> Writes:
        """What the rule writes and reads."""
        return Writes(self.query, self.key, self.strength * self.value, self.decay, self.strength * self.key)


class Writes(NamedTuple):
    """A rule of which the gated delta rule is a case: S_t = S' + k_t (v_t - S'^T r_t)^T.

    `decay` is [batch, heads, tokens, 1], or [..., key_size] where each channel of keys decays at a rate of its own;
    `seen` are the keys r [batch, heads, tokens, key_size] that read what is erased.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    seen: Tensor


def one_chunk(writes: Writes, memory: Tensor, *, before: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs and memory after one chunk of tokens, in the WY form (Yang et al. 2024, arXiv 2412.06464, §3.3).

    With `before` a key reads the memory before it decays, S_{t-1}, and not S'; only where heads decay as a whole.
    """
    total = writes.decay.cumsum(2)
    seen = total - writes.decay if before else total
    early, size = total.exp(), writes.value.shape[-1]
    right_side = torch.cat([writes.value, writes.seen * seen.exp()], dim=-1)
    erased = met(writes.seen, writes.key, total, seen, reach=-1)
    solved = torch.linalg.solve_triangular(erased, right_side, upper=False, unitriangular=True)
    values = solved[..., :size] - torch.matmul(solved[..., size:], memory)
    out = torch.matmul(met(writes.query, writes.key, total), values) + torch.matmul(writes.query * early, memory)
    last = total[:, :, -1:]
    late = writes.key * (last - total).exp()
    return out, memory * last.exp().transpose(-1, -2) + torch.matmul(late.transpose(-1, -2), values)


def by_chunks(rule: Rule, memory: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Outputs and memory after the rule's tokens; see `in_chunks`."""
    return in_chunks(one_chunk, rule.writes(), memory, chunk)


def weights(rule: Rule, *, before: bool = False) -> Tensor:
    """The effective weights [batch, heads, query, key] of the values in the outputs; `before` as of `one_chunk`."""
    total = rule.decay.cumsum(2)
    seen = total - rule.decay if before else total
    reach, erased = met(rule.query, rule.key, total), met(rule.key, rule.key, total, seen, reach=-1)
    solved: Tensor = torch.linalg.solve_triangular(
        rule.strength * erased, reach, upper=False, left=False, unitriangular=True
    )
    return solved * rule.strength.transpose(-1, -2)


def met(query: Tensor, key: Tensor, total: Tensor, seen: Tensor | None = None, *, reach: int = 0) -> Tensor:
    """The products of each query and the keys j ≤ i + reach that have decayed until it reads them, else zero, [batch,
    heads, tokens, tokens]; `seen` are the sums of log decays by then, those of `total` if None."""
    if total.shape[-1] > 1:
        return decayed_pairs(query, key, total).tril(reach)
    return faded(torch.matmul(query, key.transpose(-1, -2)), total, seen, reach=reach)
