"""The first rows of a sequence and its latest ones, seen as one state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core import Fields, RaggedBatch
from attn_core.batch import PagedView, Rows, SlotView


class SinkView:
    """A `PagedView` whose rows are the first `count` of a sequence, from a slot, and those of a window.

    The slot has fields [requests, count, ...] by the names of the window's.
    """

    def __init__(self, batch: RaggedBatch, recent: PagedView, first: SlotView, count: int) -> None:
        self.batch = batch
        self.recent = recent
        self.count = count
        self._slot = first
        self._first = first.read()

    def append(self, fields: Fields) -> Fields:
        """Remember this step's rows [tokens, ...] in the window, and those at the first positions in the slot."""
        shown = self.recent.append(fields)
        early = self.batch.positions < self.count
        if not bool(early.any()):
            return shown
        places = self.batch.request_of[early], self.batch.positions[early]
        self._first = {
            name: held.index_put(places, fields[name][early].to(held.dtype)) for name, held in self._first.items()
        }
        self._slot.write(self._first)
        whole = early[:, None, None]
        return {name: torch.where(whole, fields[name].to(rows.dtype), rows) for name, rows in shown.items()}

    def rows(self, requests: Sequence[int]) -> Rows:
        """The first rows of these requests, then those in the window that are not among them."""
        recent = self.recent.rows(requests)
        chosen = torch.tensor(list(requests), device=recent.positions.device)
        ends = torch.tensor([self.batch.contexts[r] + self.batch.lengths[r] for r in requests], device=chosen.device)
        places = torch.arange(self.count, device=chosen.device).expand(len(chosen), -1)
        later = recent.positions >= self.count
        key_padding_mask = torch.cat(
            [places < ends[:, None], later if recent.key_padding_mask is None else later & recent.key_padding_mask],
            dim=1,
        )
        fields = {
            name: torch.cat([self._first[name][chosen].to(rows.dtype), rows], dim=1)
            for name, rows in recent.fields.items()
        }
        return Rows(fields, torch.cat([places, recent.positions], dim=1), key_padding_mask)
