"""Which blocks a query reads whole, and reading them."""

from __future__ import annotations

from functools import partial

import torch
from attn_core.chosen import Blocks, Pieces, attend_to_chosen
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attn_nsa.options import PIECE, NsaConfig

NEVER = float("-inf")
ALWAYS = 1e6
"""More than a sum of shares can be."""


def select(shares_of_blocks: Tensor, own: Tensor, blocks: int, options: NsaConfig) -> Tensor:
    """Blocks [batch, groups, query, top], int64, -1 where there are fewer; no gradient passes through the choice.

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
        best = pad(worth, (0, options.top), value=NEVER).topk(options.top, dim=-1)
        return best.indices.masked_fill(best.values == NEVER, -1)


def read(query: Tensor, chosen: Tensor, places: Tensor, blocks: Blocks) -> Tensor:
    """Outputs [batch, groups, query, shared, value_size] over the blocks chosen; arguments as of `attend_to_chosen`."""
    if torch.compiler.is_compiling():
        return attend_to_chosen(query, chosen, places, blocks)
    # The backward pass scores the keys again, a piece at a time.
    run = partial(checkpoint, attend_to_chosen, use_reentrant=False)
    return Pieces(PIECE, run, torch.cat).attend(query, chosen, places, blocks)
