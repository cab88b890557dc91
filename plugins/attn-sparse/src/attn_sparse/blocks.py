"""Blocks of consecutive tokens that are mixed into one row each: compressed entries, and the index keys of pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from attn_core import Fields, RaggedBatch
from attn_core.batch import PagedView
from attn_core.masking import shares
from torch import Tensor


def mixed(value: Tensor, gate: Tensor, real: Tensor) -> Tensor:
    """Σ_j softmax_j(gate_j) ⊙ value_j, per element, [..., size], over the real tokens j of blocks [..., token, size].

    `real` [..., token], bool; rows without a real token are zero.
    """
    weights = shares(gate.transpose(-1, -2), real[..., None, :])
    return (weights * value.transpose(-1, -2)).sum(-1)


@dataclass(frozen=True, eq=False)
class CompletedBlocks:
    """The blocks that a step completes, of the requests that complete any.

    `fields[name]` [requests, tokens, size] are the rows of their tokens in order, after those of `before` tokens in
    front of the first block; `real` [requests, tokens], bool, says which of these exist; `first` [requests], int64, is
    the position of the first block's first token, and `counts` are the numbers of blocks.
    """

    fields: Fields
    real: Tensor
    first: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, batch: RaggedBatch, view: PagedView, every: int, before: int = 0) -> CompletedBlocks | None:
        """The blocks of `every` tokens that this step completes, from a state that holds its tokens and those of open
        blocks, and `before` tokens in front of these; None if there are none."""
        spans = batch.new_rows(every)
        ending = [request for request, blocks in enumerate(spans) if blocks]
        if not ending:
            return None
        rows, counts = view.rows(ending), tuple(len(spans[request]) for request in ending)
        device, length = rows.positions.device, max(counts) * every + before
        first = torch.tensor([spans[request].start * every for request in ending], device=device)
        place = rows.positions - (first - before)[:, None]
        outside = (place < 0) | (place >= length)
        if rows.key_padding_mask is not None:
            outside = outside | ~rows.key_padding_mask
        place = place.where(~outside, length)
        real = torch.zeros(len(ending), length + 1, dtype=torch.bool, device=device).scatter(1, place, value=True)
        fields = {
            name: field.new_zeros(len(ending), length + 1, field.shape[-1]).scatter(
                1, place[..., None].expand(-1, -1, field.shape[-1]), field
            )[:, :length]
            for name, field in rows.fields.items()
        }
        return cls(fields, real[:, :length], first, counts)

    def in_order(self, rows: Mapping[str, Tensor], dtype: torch.dtype) -> Fields:
        """The rows [blocks, size] that were mixed of these blocks, [requests, blocks, size], in batch order."""
        return {
            name: torch.cat([one[:count] for one, count in zip(field, self.counts, strict=True)]).to(dtype)
            for name, field in rows.items()
        }
