"""Which blocks a query reads."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


def choose(query: Tensor, key: Tensor, key_padding_mask: Tensor, own: Tensor, top: int) -> Tensor:
    """Blocks [batch, query, heads, top], int64: the own one and the best before it; -1 where there are fewer.

    There are no more than `top` and than all blocks.

    `query` [batch, query, heads, size], `key` [batch, block, heads, within, size], `key_padding_mask` [batch, block,
    within], `own` [batch, query] the block that each query stands in. A block's score is the product of the query and
    the mean of the block's real keys. No gradient passes through the choice.
    """
    with torch.no_grad():
        real = key_padding_mask[:, :, None, :, None]
        means = (key * real).sum(3) / real.sum(3).clamp(min=1)
        scores = query.transpose(1, 2) @ means.permute(0, 2, 3, 1)
        blocks = torch.arange(key.shape[1], device=query.device)
        past = (blocks < own[..., None]) & key_padding_mask.any(-1)[:, None]
        scores = scores.transpose(1, 2).masked_fill(~past[:, :, None], NEVER)
        best = scores.topk(max(0, min(top, key.shape[1]) - 1), dim=-1)
        others = best.indices.masked_fill(best.values == NEVER, -1)
        return torch.cat([own[:, :, None, None].expand(*others.shape[:3], 1), others], dim=-1)
