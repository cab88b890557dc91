"""Reading chosen blocks of keys."""

from __future__ import annotations

from functools import partial

import torch
from attn_core import Operands
from attn_core.chosen import Blocks, Pieces, attend_to_chosen
from attn_core.chosen_whole import Part, WholeBlocks, whole
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


def fusable(operands: Operands) -> bool:
    """Whether `read_whole` can read these; it gives no gradients."""
    free = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    return free and whole(operands) and bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]


def read_whole(query: Tensor, chosen: Tensor, blocks: Blocks) -> Tensor:
    """As `read`, by torch's fused function; the first choice is the block that the query stands in."""
    return WholeBlocks(fused, torch.cat).attend(query, chosen, blocks)


def fused(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Part:
    """Outputs and logarithms of sums, see `WholeBlocks`."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 -- the only one that gives both
    found: Part = attend(query, key, value, 0.0, causal, scale=1.0)
    return found
