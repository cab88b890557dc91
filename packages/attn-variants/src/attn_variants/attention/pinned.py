"""Tokens that a layer keeps permanently beside a window of the most recent ones, such as attention sinks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core import Fields, LayerState, Mask, RaggedBatch
from attn_core.batch import PagedView, Rows, SlotView, StaticBatch
from attn_core.declared import PINNED
from attn_core.graph_safety import device_cache
from attn_core.masks import pinned_positions
from torch import Tensor

from attn_variants.compute.constants import in_trace


class PinnedRows:
    """A `PagedView` that combines the rows at pinned positions, kept in a slot, with those of a window, `recent`.

    `slot` is the view of the pinned rows and their fields [requests, positions, ...], named as those of the window.
    """

    def __init__(
        self, batch: RaggedBatch, recent: PagedView, slot: tuple[SlotView, Fields], positions: tuple[int, ...]
    ) -> None:
        self.batch = batch
        self.recent = recent
        self._slot, self._held = slot
        self._positions = positions
        self._places = (_made if in_trace() else _kept)(positions, batch.positions.device)

    def append(self, fields: Fields) -> Fields:
        """Write this step's rows [tokens, ...] to the window, and those at pinned positions to the slot as well."""
        shown = self.recent.append(fields)
        if isinstance(self.batch, StaticBatch):
            return self._append_in_place(fields, shown)
        if not any(context <= self._positions[-1] for context in self.batch.contexts):
            return shown
        numbers, early = self._find(self.batch.positions)
        places = self.batch.request_of[early], numbers[early]
        self._held = {
            name: held.index_put(places, fields[name][early].to(held.dtype)) for name, held in self._held.items()
        }
        self._slot.write(self._held)
        return {
            name: torch.where(early.view(-1, *[1] * (rows.dim() - 1)), fields[name].to(rows.dtype), rows)
            for name, rows in shown.items()
        }

    def _append_in_place(self, fields: Fields, shown: Fields) -> Fields:
        """`append` for one row per request, without reading positions on the host, as graph capture requires."""
        numbers, early = self._find(self.batch.positions)
        places, here = (self.batch.request_of, numbers), {}
        for name, held in self._held.items():
            pinned = early.view(-1, *[1] * (held.dim() - 2))
            here[name] = held.index_put(places, torch.where(pinned, fields[name].to(held.dtype), held[places]))
        self._held = here
        self._slot.write(here)
        return {
            name: torch.where(early.view(-1, *[1] * (rows.dim() - 1)), fields[name].to(rows.dtype), rows)
            for name, rows in shown.items()
        }

    def _ends(self, requests: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The indices [requests] of the given requests, and the position after the last row of each."""
        if isinstance(self.batch, StaticBatch):
            return self.batch.request_of, self.batch.positions + 1
        ends = [self.batch.contexts[r] + self.batch.lengths[r] for r in requests]
        return self._places.new_tensor(list(requests)), self._places.new_tensor(ends)

    def rows(self, requests: Sequence[int]) -> Rows:
        """The pinned rows of these requests, followed by the other rows in their window."""
        recent = self.recent.rows(requests)
        chosen, ends = self._ends(requests)
        places = self._places.expand(len(chosen), -1)
        later = ~self._find(recent.positions)[1]
        later = later if recent.key_padding_mask is None else later & recent.key_padding_mask
        key_padding_mask = torch.cat([places < ends[:, None], later], dim=1)
        fields = {
            name: torch.cat([self._held[name][chosen].to(rows.dtype), rows], dim=1)
            for name, rows in recent.fields.items()
        }
        return Rows(fields, torch.cat([places, recent.positions], dim=1), key_padding_mask)

    def _find(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For each position, the index of the pinned position that equals it, and whether there is one."""
        numbers = torch.searchsorted(self._places, positions.contiguous()).clamp(max=len(self._positions) - 1)
        return numbers, self._places[numbers] == positions


def _made(positions: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.tensor(positions, dtype=torch.int64, device=device)


_kept = device_cache(64)(_made)
"""Cached int64 tensors of positions, one for each device."""


def kept_rows(mask: Mask, batch: RaggedBatch, state: LayerState) -> PagedView:
    """The view of the keys and values that a layer with this mask caches, including pinned ones if it has any."""
    view: PagedView = state["kv"]
    if PINNED not in state:
        return view
    held = state[PINNED].read()
    # A layer that shares the cache of another layer may have no pinned positions in its own mask.
    positions = pinned_positions(mask, next(iter(held.values())).shape[1])
    return PinnedRows(batch, view, (state[PINNED], held), positions) if positions else view
