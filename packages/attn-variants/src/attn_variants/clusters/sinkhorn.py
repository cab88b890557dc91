"""Attention within blocks that are sorted to each other (Tay et al. 2020, arXiv 2002.11296)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attn_variants.whole_layer import softmax_over

LOWEST = -1e30
"""The logarithm of nothing, finite so that differences of it are."""


class SortedBlocks(nn.Module):
    """A token attends to its own block of `block` tokens and to one mixed of all blocks for its own.

    Blocks are mixed by a matrix whose rows and columns sum to one: `iterations` times normalised exponentials of the
    products of the blocks' mean queries and mean keys, divided by √size and the `temperature`.
    """

    def __init__(self, *, block: int, iterations: int, temperature: float) -> None:
        super().__init__()
        self.block = block
        self.iterations = iterations
        self.temperature = temperature

    def forward(self, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
        """Outputs [batch, heads, tokens, size]."""
        tokens = query.shape[2]
        blocks = (tokens + self.block - 1) // self.block
        spare = blocks * self.block - tokens
        real = torch.ones_like(query[:, 0, :, 0], dtype=torch.bool) if keep is None else keep
        real = pad(real, (0, spare)).reshape(-1, blocks, self.block)
        queries, keys, values = (self._blocks(rows, real, spare) for rows in (query, key, value))
        mix = self.mixture(queries, keys, real)
        sorted_keys, sorted_values = (self._mixed(mix, rows) for rows in (keys, values))
        seen = torch.cat([real, real.any(1, keepdim=True).expand_as(real)], dim=-1)[:, None, :, None]
        scores = torch.matmul(queries, torch.cat([keys, sorted_keys], dim=3).mT) * query.shape[-1] ** -0.5
        out = torch.matmul(softmax_over(scores, seen), torch.cat([values, sorted_values], dim=3))
        return out.flatten(2, 3)[:, :, :tokens]

    def mixture(self, queries: Tensor, keys: Tensor, real: Tensor) -> Tensor:
        """Shares [batch, heads, blocks, blocks] of blocks in blocks, of rows [batch, heads, blocks, block, size].

        Padding must be zero; blocks of nothing else, by `real` [batch, blocks, block], have no share.
        """
        count = real.sum(-1).clamp(min=1)[:, None, :, None]
        means = [rows.sum(3) / count for rows in (queries, keys)]
        scale = queries.shape[-1] ** -0.5 / self.temperature
        some = real.any(-1)
        pairs = (some[:, :, None] & some[:, None, :])[:, None]
        shares = (torch.matmul(means[0], means[1].mT) * scale).masked_fill(~pairs, LOWEST)
        for _ in range(self.iterations):
            for axis in (-1, -2):
                shares = (shares - shares.logsumexp(axis, keepdim=True)).masked_fill(~pairs, LOWEST)
        return torch.exp(shares)

    def _blocks(self, rows: Tensor, real: Tensor, spare: int) -> Tensor:
        """Rows as [batch, heads, blocks, block, size], zeros for padding."""
        cut = pad(rows, (0, 0, 0, spare)).reshape(*rows.shape[:2], real.shape[1], self.block, rows.shape[-1])
        return cut.masked_fill(~real[:, None, :, :, None], 0.0)

    @staticmethod
    def _mixed(mix: Tensor, rows: Tensor) -> Tensor:
        return torch.matmul(mix, rows.flatten(3)).reshape(rows.shape)
