"""What every step over remembered rows keeps: its requests, and what they see, found once for all layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from attn_core import RaggedBatch
from torch import Tensor

Window = int | None
"""The most tokens back that a state keeps, with the newest; None keeps all."""

Owner = TypeVar("Owner")
Seen = TypeVar("Seen")


def located(batch: RaggedBatch, requests: Sequence[int], positions: Tensor, firsts: Sequence[int]) -> Tensor:
    """Where the rows at these positions [requests, longest] lie, counted as positions are: elsewhere in a tree alone.

    `firsts` are the positions of the first column.
    """
    paths = [batch.path(request) for request in requests]
    if not any(paths):
        return positions
    places = positions.clone()
    for row, (request, path) in enumerate(zip(requests, paths, strict=True)):
        if path:
            column = batch.contexts[request] + 1 - len(path) - firsts[row]
            seen = path[max(0, -column) :]
            column = max(0, column)
            places[row, column : column + len(seen)] = torch.tensor(seen, device=places.device)
            # What pads it would be other tokens of its tree.
            places[row, column + len(seen) :] = places[row, 0]
    return places


class RowsStep(Generic[Owner, Seen]):
    """The requests of one step and the places of theirs in the owner's memory."""

    def __init__(self, owner: Owner, places: Sequence[int], batch: RaggedBatch) -> None:
        self.owner = owner
        self.places = tuple(places)
        self.batch = batch
        self.tokens = sum(batch.lengths)
        self._selections: dict[tuple[Window, tuple[int, ...]], Seen] = {}

    def select(self, window: Window, requests: Sequence[int]) -> Seen:
        """What these requests of the batch see; the same for all layers of one window."""
        key = (window, tuple(requests))
        if key not in self._selections:
            self._selections[key] = self._select(*key)
        return self._selections[key]

    @abstractmethod
    def _select(self, window: Window, requests: tuple[int, ...]) -> Seen: ...
