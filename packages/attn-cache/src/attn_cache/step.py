"""What every step over remembered rows keeps: its requests, and what they see, found once for all layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from attn_core import RaggedBatch

Window = int | None
"""The most tokens back that a state keeps, with the newest; None keeps all."""

Owner = TypeVar("Owner")
Seen = TypeVar("Seen")


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
