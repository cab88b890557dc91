"""Index keys of pools of tokens, as GLM-5.3 has them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import cast

import torch
from attn_core import Mask
from attn_core.masking import seen_pairs, wide
from torch import Tensor, nn

from attn_sparse.blocks import mixed
from attn_sparse.dsa.indexer import Indexer, index_scores
from attn_sparse.dsa.selection import Choice, Memory, Tile, choose
from attn_sparse.sparse_mla.options import SparseMlaConfig


class PooledIndexer(Indexer):
    """The indexer of `dsa`, whose keys are mixed over pools of consecutive tokens: Σ_j softmax_j(W x_j + b_j) ⊙ k_j.

    Learned besides: `pool_gate` W (`nn.Linear` without bias) and `pool_bias` b [pool, index_size].
    """

    def __init__(self, options: SparseMlaConfig) -> None:
        super().__init__(options)
        self.pool = options.pool or 1
        self.pool_gate = nn.Linear(options.hidden_size, options.index_size, bias=False)
        self.pool_bias = nn.Parameter(torch.zeros(self.pool, options.index_size))

    def pooled(self, keys: Tensor, gates: Tensor, real: Tensor) -> Tensor:
        """The index keys [batch, pools, size] of consecutive pools, at least float32, of keys and gates [batch, pools ·
        pool, size] of their tokens, of which those where `real` [batch, pools · pool], bool, is true exist."""
        by_pool = keys.shape[1] // self.pool, self.pool
        keys, gates, real = (torch.unflatten(rows, 1, by_pool) for rows in (keys, gates, real))
        return mixed(wide(keys), wide(gates) + wide(self.pool_bias), real)

    def pools(self, keys: Tensor, gates: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The index keys of the complete pools of whole sequences [batch, tokens, size], see `pooled`; the positions of
        their last tokens [1, pools], and whether they have a real one [batch, pools]."""
        count = keys.shape[1] // self.pool
        keys, gates, real = (rows[:, : count * self.pool] for rows in (keys, gates, real))
        last = (torch.arange(count, device=keys.device) + 1) * self.pool - 1
        return self.pooled(keys, gates, real), last[None], torch.unflatten(real, 1, (count, self.pool)).any(-1)


@dataclass(frozen=True, eq=False, kw_only=True)
class PooledMemory(Memory):
    """A `Memory` whose index keys are those of pools of `every` tokens, counted from position 0, in order.

    `last` [batch or 1, pool] are the positions of their last tokens; `kept` [batch, pool], or None if all pools are
    real.
    """

    every: int
    last: Tensor
    kept: Tensor | None

    def until(self, keys: int) -> PooledMemory:
        """The first keys, and the pools that are complete by then."""
        pools = keys // self.every
        kept = None if self.kept is None else self.kept[:, :pools]
        cut = cast("PooledMemory", super().until(keys))
        return dataclasses.replace(cut, index=self.index[:, :pools], last=self.last[:, :pools], kept=kept)

    def chooses_all(self, top: int) -> bool:
        """Whether there are no more complete pools than those that a query chooses."""
        return self.index.shape[1] <= top // self.every

    def choose(self, tile: Tile, mask: Mask, top: int) -> Choice:
        """The tokens of the best complete pools, at most `top`, and those of the pool that is not complete."""
        scores = index_scores(tile.index, tile.weights, self.index)
        complete = seen_pairs(mask, tile.positions, self.last, self.kept)[:, 0]
        chosen = choose(scores, complete, min(top // self.every, scores.shape[-1]))
        of_token = self._pools()[:, None].expand(len(chosen), chosen.shape[1], -1)
        inside = nn.functional.pad(chosen, (0, 1)).gather(2, of_token)
        open_pool = self.positions[:, None] // self.every == (tile.positions[:, :, None] + 1) // self.every
        return Choice((inside | open_pool) & self.seen(tile, mask), chosen, scores)

    def shares_of_index(self, weights: Tensor) -> Tensor:
        """The mean weights over heads that complete pools get, of all that they get together."""
        mean = weights.mean(1, keepdim=True)
        of_token = self._pools()[:, None, None].expand_as(mean)
        sums = mean.new_zeros(*mean.shape[:-1], self.last.shape[1] + 1).scatter_add(3, of_token, mean)[..., :-1]
        return sums / sums.sum(-1, keepdim=True).clamp(min=torch.finfo(sums.dtype).tiny)

    def _pools(self) -> Tensor:
        """The pool of each token, [batch or 1, key]; that of tokens of incomplete pools is one after the last."""
        return (self.positions // self.every).clamp(max=self.last.shape[1])
