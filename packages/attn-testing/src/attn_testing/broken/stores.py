"""A store that keeps every law of caches, and stores that each break one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attn_core import CacheFamily, Paged
from attn_core.stores import ModelSpecs, StateStore, StoreSize, Usage

from attn_testing.law import Law
from attn_testing.laws import caches as laws_of_caches
from attn_testing.memory import DictionaryStore, Held


class SoundStore(DictionaryStore):
    """The kit's dictionaries, with bounds."""

    def __init__(self, specs: ModelSpecs, size: StoreSize) -> None:
        super().__init__(specs, size.dtype)
        self.size = size
        self.reserved: dict[int, int] = {}
        self.paged = any(isinstance(spec, Paged) for states in specs.values() for spec in states.values())

    def fits(self, tokens: int) -> bool:
        """Whether the tokens are no more than there are."""
        return not self.paged or tokens <= self.size.tokens

    def admit(self, request: int) -> bool:
        """Open an empty request where there is a place."""
        if len(self.reserved) == self.size.requests:
            return False
        self.reserved[request] = 0
        return super().admit(request)

    def reserve(self, request: int, tokens: int) -> bool:
        """Take the missing tokens where there are so many."""
        missing = max(0, tokens - self.reserved[request])
        if self.paged and sum(self.reserved.values()) + missing > self.size.tokens:
            return False
        self.reserved[request] += missing
        return True

    def release(self, request: int) -> None:
        """Give back everything."""
        super().release(request)
        del self.reserved[request]

    def usage(self) -> Usage:
        """What is taken."""
        taken = sum(self.reserved.values()) if self.paged else 0
        requests = len(self.reserved)
        return Usage(tokens=taken, tokens_total=self.size.tokens, requests=requests, requests_total=self.size.requests)


class StaleStore(SoundStore):
    """Breaks views: a new request finds the slots of one that was released."""

    left: Held | None = None

    def admit(self, request: int) -> bool:
        """Open a request in memory that nobody cleaned."""
        admitted = super().admit(request)
        if admitted and self.left is not None:
            self._held[request].slots = self.left.slots
        return admitted

    def release(self, request: int) -> None:
        """Leave everything where it is."""
        self.left = self._held[request]
        super().release(request)


class GreedyStore(SoundStore):
    """Breaks the refusal: takes what there is before it finds that it is not enough."""

    def reserve(self, request: int, tokens: int) -> bool:
        """Take tokens one by one."""
        while self.reserved[request] < tokens:
            if not super().reserve(request, self.reserved[request] + 1):
                return False
        return True


class LeakyStore(SoundStore):
    """Breaks the release: a token of every request stays taken."""

    lost = 0

    def release(self, request: int) -> None:
        """Forget one."""
        super().release(request)
        self.lost += 1

    def usage(self) -> Usage:
        """What is taken and what was lost."""
        sound = super().usage()
        return Usage(
            tokens=min(sound.tokens + self.lost, sound.tokens_total),
            tokens_total=sound.tokens_total,
            requests=sound.requests,
            requests_total=sound.requests_total,
        )


class WastefulStore(SoundStore):
    """Breaks live bytes: keeps one row too many."""

    def live_bytes(self, request: int, tokens: int) -> int:
        """A byte more than the tensors."""
        return super().live_bytes(request, tokens) + 1


class StoreFamily(CacheFamily):
    """A family of one of these stores."""

    name: ClassVar[str] = "dictionary"
    summary: ClassVar[str] = "Dictionaries of rows."

    def __init__(self, store: type[SoundStore]) -> None:
        self.store = store

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """An empty store."""
        return self.store(specs, size)


BROKEN_STORES: Mapping[type[Law], CacheFamily] = {
    laws_of_caches.ViewsEqual: StoreFamily(StaleStore),
    laws_of_caches.RefusesWhenFull: StoreFamily(GreedyStore),
    laws_of_caches.ReleaseFreesAll: StoreFamily(LeakyStore),
    laws_of_caches.LiveBytes: StoreFamily(WastefulStore),
}
"""The cache that breaks each law."""
