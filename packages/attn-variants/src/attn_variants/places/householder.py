"""Scores of queries and keys along paths of reflections."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core import Heads
from attn_core.masking import of_query_heads
from torch import Tensor
from torch.nn.functional import pad


class Paths(NamedTuple):
    """What turns a query on its way back: H_t = I - β_t w_t w_tᵀ of every token t.

    `direction` w [batch, key_value_heads, key, size], of length one or zero; `strength` β [batch, key_value_heads,
    key].
    """

    direction: Tensor
    strength: Tensor


class Blocks(NamedTuple):
    """Tokens in blocks: [batch, key_value_heads, blocks, token, size] each.

    A block turns a query q to q - (q·w) U; `key_turns` X are what its tokens add to the scores of its earlier keys.
    """

    key: Tensor
    direction: Tensor
    key_turns: Tensor
    query_turns: Tensor


def path_scores(heads: Heads, query: Tensor, key: Tensor, paths: Paths, places: Tensor, block: int) -> Tensor:
    """q_iᵀ H_i H_{i-1} ... H_{j+1} k_j, [batch, heads, query, key]; above the diagonal they mean nothing.

    `query` [batch, heads, query, size] at `places` [batch or 1, query]; `key` [batch, key_value_heads, key, size] at
    0, 1, ... Queries go back block by block of so many tokens, whose products of reflections are sums of as many
    outer products (Yang et al. 2025, arXiv 2505.16381, section 3.2).
    """
    keys = key.shape[2]
    if keys == 0:
        return query.new_zeros(*query.shape[:3], 0)
    parts = Blocks(*(of_query_heads(heads, part) for part in in_blocks(key, paths, block)))
    columns: list[Tensor] = []
    for number in reversed(range(parts.key.shape[2])):
        tokens = torch.arange(number * block, (number + 1) * block, device=query.device)
        ahead = tokens > places[:, None, :, None]
        met = (query @ parts.direction[:, :, number].transpose(-1, -2)).masked_fill(ahead, 0.0)
        columns.append(query @ parts.key[:, :, number].transpose(-1, -2) - met @ parts.key_turns[:, :, number])
        query = query - met @ parts.query_turns[:, :, number]
    return torch.cat(columns[::-1], dim=-1)[..., :keys]


def in_blocks(key: Tensor, paths: Paths, block: int) -> Blocks:
    """Both sums of outer products of every block solve one triangular system."""
    key, direction = split(key, block), split(paths.direction, block)
    strength = split(paths.strength[..., None], block)
    told = strength * torch.cat([(direction @ key.transpose(-1, -2)).tril(-1), direction], dim=-1)
    overlap = strength * (direction @ direction.transpose(-1, -2)).tril(-1)
    solved = torch.linalg.solve_triangular(overlap, told, upper=False, unitriangular=True)
    return Blocks(key, direction, solved[..., :block], solved[..., block:])


def split(rows: Tensor, block: int) -> Tensor:
    """[batch, heads, blocks, token, size] of rows [batch, heads, key, size], with rows of zeros at the end."""
    blocks = (rows.shape[2] + block - 1) // block
    return pad(rows, (0, 0, 0, blocks * block - rows.shape[2])).unflatten(2, (blocks, block))  # type: ignore[no-any-return, no-untyped-call]
