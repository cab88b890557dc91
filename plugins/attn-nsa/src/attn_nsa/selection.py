"""Which blocks a query reads whole."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_nsa.options import NsaConfig

NEVER = float("-inf")
ALWAYS = 1e6
"""More than a sum of shares can be."""


def select(shares_of_blocks: Tensor, own: Tensor, blocks: int, options: NsaConfig) -> Tensor:
    """Blocks [batch, groups, query, top], int64, -1 where there are fewer; no gradient passes through the choice.

    There are no more than `options.top` and than all blocks.

    `shares_of_blocks` [batch, groups, query, compressed] are what the heads of a group give to compressed blocks, `own`
    [batch, query] the block that each query stands in, `blocks` how many there are. A block is worth the shares of the
    compressed blocks in it, each by its overlap (equation 9 of the paper); the own block, the first and the one before
    the own always come first.
    """
    with torch.no_grad():
        # A compressed block covers so many strides; each stride gets the shares of all blocks over it.
        cover, strides = options.compress // options.stride, options.select // options.stride
        length = shares_of_blocks.shape[-1]
        behind = pad(shares_of_blocks, (cover - 1, blocks * strides - length))
        worth = sum(behind[..., shift : shift + blocks * strides] for shift in range(cover))
        worth = torch.as_tensor(worth).reshape(*behind.shape[:-1], blocks, strides).sum(-1)
        block = torch.arange(blocks, device=own.device)
        here = own[:, None, :, None]
        for rank, fixed in enumerate((block == here - 1, block == 0, block == here)):
            worth = worth.masked_fill(fixed, ALWAYS * (rank + 1))
        worth = worth.masked_fill(block > here, NEVER)
        best = worth.topk(min(options.top, blocks), dim=-1)
        return best.indices.masked_fill(best.values == NEVER, -1)
