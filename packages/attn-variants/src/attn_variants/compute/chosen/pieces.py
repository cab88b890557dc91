"""As many scores at once as memory should hold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_variants.compute.chosen.tiles import TILE, attend_in_tiles

PIECE = 1 << 21
"""Most scores held at once, but while compiling."""


def attend_in_pieces(choices: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
    """Outputs, as of `SelectedBlocksKernel.read`, of as many queries of a group together as can be, for fuller tiles.

    The backward pass scores the keys again, a piece at a time.
    """
    if torch.compiler.is_compiling():
        return attend_in_tiles(*choices, blocks)
    return torch.cat([torch.cat(list(pieces(*lane)), dim=2) for lane in lanes(choices, blocks)], dim=1)


def lanes(choices: SelectedBlocks, blocks: KeyBlocks) -> Iterator[tuple[SelectedBlocks, KeyBlocks, int]]:
    """Some groups at a time, and how many of their queries go together."""
    query, chosen, places = choices
    batch, groups, queries, shared, _ = query.shape
    each = max(1, batch * shared * chosen.shape[-1] * blocks.key_padding_mask.shape[-1])
    length = max(1, min(queries, PIECE // each))
    width = max(1, min(groups, PIECE // (each * max(1, queries))))
    for start in range(0, groups, width):
        group = slice(start, start + width)
        some = KeyBlocks(blocks.key[:, group], blocks.value[:, group], blocks.key_padding_mask)
        yield SelectedBlocks(query[:, group], chosen[:, group], places), some, length


def pieces(choices: SelectedBlocks, blocks: KeyBlocks, length: int) -> Iterator[Tensor]:
    """The outputs of so many queries at a time."""
    run = partial(checkpoint, attend_in_tiles, use_reentrant=False)
    for first in range(0, choices.query.shape[2], length):
        rows = slice(first, first + length)
        part = choices.query[:, :, rows], choices.chosen[:, :, rows], choices.places[:, rows]
        yield run(*part, blocks, min(TILE, part[0].shape[2]))
