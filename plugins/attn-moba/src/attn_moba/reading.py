"""Reading chosen blocks of keys."""

from __future__ import annotations

from functools import partial

import torch
from attn_core.chosen import Blocks, Pieces, attend_to_chosen
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_moba import PIECE


def read(query: Tensor, chosen: Tensor, places: Tensor, blocks: Blocks) -> Tensor:
    """Outputs [batch, groups, query, shared, value_size] over the blocks chosen; arguments as of `attend_to_chosen`."""
    if torch.compiler.is_compiling():
        return attend_to_chosen(query, chosen, places, blocks)
    # The backward pass scores the keys again, a piece at a time.
    run = partial(checkpoint, attend_to_chosen, use_reentrant=False)
    return Pieces(PIECE, run, torch.cat).attend(query, chosen, places, blocks)
