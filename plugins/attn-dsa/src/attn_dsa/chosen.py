"""Attention to the tokens that the indexer chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, Fields, InnerAttention
from attn_core.masking import positions, wide
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_dsa.alignment import with_loss
from attn_dsa.indexer import Indexer
from attn_dsa.options import DsaConfig
from attn_dsa.reading import chosen_keys, gathered, masked, masked_and_far, masked_weights
from attn_dsa.tile import Memory, Tile

Read = TypeVar("Read")

PIECE = 1 << 21
"""Most scores held at once, but while compiling."""


class SelectedTokens(InnerAttention, nn.Module):
    """Each query attends to the `top` tokens that `indexer` gives the largest scores, the same in all heads."""

    def __init__(self, spec: AttentionSpec, options: DsaConfig) -> None:
        super().__init__()
        self.spec = spec
        self.options = options
        self.indexer = Indexer(options)

    def remember(self, rows: Tensor) -> Fields:
        """ "index": one key [..., index_size] of rows [..., width]."""
        return {"index": self.indexer.keys(rows)}

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]; `attend`, causal attention, where every token is chosen."""
        if self.training and self.options.align > 0 and torch.is_grad_enabled():
            return self._aligned(rows, operands)
        if operands.key.shape[1] <= self.options.top:
            return attend(operands)
        tile, memory = self._tile(rows, operands), self._memory(operands)
        if operands.query.shape[1] == 1:
            return gathered(tile, memory, self.spec, self.options.top).to(rows.dtype)
        return torch.cat(self._in_pieces(masked, tile, memory), dim=1).to(rows.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Weights [batch, heads, query, key], zero where a token is not chosen."""
        if operands.key.shape[1] <= self.options.top:
            return attend(operands)
        tile, memory = self._tile(rows, operands), self._memory(operands)
        chosen, _ = chosen_keys(tile, memory, self.spec.mask, self.options.top)
        return masked_weights(tile, memory, self.spec, chosen)

    def _aligned(self, rows: Tensor, operands: AttentionInputs) -> Tensor:
        """The outputs; going back, they move the indexer too."""
        tile, memory = self._tile(rows, operands), self._memory(operands)
        outputs, losses = zip(*self._in_pieces(masked_and_far, tile, memory), strict=True)
        loss = torch.cat(losses, dim=1)
        real = (
            torch.ones_like(loss)
            if operands.key_padding_mask is None
            else operands.key_padding_mask[:, -rows.shape[1] :]
        )
        loss = self.options.align * (loss * real).sum() / real.sum().clamp(min=1)
        return with_loss(torch.cat(outputs, dim=1).to(rows.dtype), loss)

    def _in_pieces(self, read: Callable[..., Read], tile: Tile, memory: Memory) -> list[Read]:
        """What `read` gives for the tile, piece by piece."""
        largest = max(self.options.index_heads, self.spec.heads.query)
        length = max(1, PIECE // max(1, largest * memory.key[:, :, 0, 0].numel()))
        further = memory, self.spec, self.options.top
        if torch.compiler.is_compiling() or length >= tile.positions.shape[1]:
            return [read(tile, *further)]
        if not torch.is_grad_enabled():
            return [read(piece, *further) for piece in tile.pieces(length)]
        # Scores of all pairs are not kept for the backward pass, which computes them again, a piece at a time.
        return [checkpoint(read, piece, *further, use_reentrant=False) for piece in tile.pieces(length)]

    def _tile(self, rows: Tensor, operands: AttentionInputs) -> Tile:
        places = positions(operands)[0].expand(rows.shape[0], -1)
        query = wide(operands.query) * self.spec.heads.key_size**-0.5
        return Tile(query, self.indexer.queries(rows, places), self.indexer.weights(rows), places)

    def _memory(self, operands: AttentionInputs) -> Memory:
        places = positions(operands)[1]
        index = self.indexer.turned_keys(operands.fields["index"], places)
        return Memory(wide(operands.key), wide(operands.value), index, places, operands.key_padding_mask)
