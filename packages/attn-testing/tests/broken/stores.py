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
    """A `DictionaryStore` with bounds on tokens and requests."""

    def __init__(self, specs: ModelSpecs, size: StoreSize) -> None:
        super().__init__(specs, size.dtype)
        self.size = size
        self.reserved: dict[int, int] = {}
        self.paged = any(isinstance(spec, Paged) for states in specs.values() for spec in states.values())

    def fits(self, tokens: int) -> bool:
        """Whether the store has room for so many tokens when it is empty."""
        return not self.paged or tokens <= self.size.tokens

    def admit(self, request: int) -> bool:
        """Open an empty request; False if the maximum number of requests is held."""
        if len(self.reserved) == self.size.requests:
            return False
        self.reserved[request] = 0
        return super().admit(request)

    def reserve(self, request: int, tokens: int) -> bool:
        """Reserve the missing tokens; False if there are not enough."""
        missing = max(0, tokens - self.reserved[request])
        if self.paged and sum(self.reserved.values()) + missing > self.size.tokens:
            return False
        self.reserved[request] += missing
        return True

    def release(self, request: int) -> None:
        """Free everything that the request holds."""
        super().release(request)
        del self.reserved[request]

    def usage(self) -> Usage:
        """The tokens and requests in use."""
        taken = sum(self.reserved.values()) if self.paged else 0
        requests = len(self.reserved)
        return Usage(tokens=taken, tokens_total=self.size.tokens, requests=requests, requests_total=self.size.requests)


class StaleStore(SoundStore):
    """Breaks views equal: a new request gets the slots of one that was released."""

    left: Held | None = None

    def admit(self, request: int) -> bool:
        """Open a request in memory that was not cleared."""
        admitted = super().admit(request)
        if admitted and self.left is not None:
            self._held[request].slots = self.left.slots
        return admitted

    def release(self, request: int) -> None:
        """Release the request, but keep its states for the next one."""
        self.left = self._held[request]
        super().release(request)


class GreedyStore(SoundStore):
    """Breaks refuses when full: takes all free tokens before it finds that they do not suffice."""

    def reserve(self, request: int, tokens: int) -> bool:
        """Reserve tokens one by one."""
        while self.reserved[request] < tokens:
            if not super().reserve(request, self.reserved[request] + 1):
                return False
        return True


class LeakyStore(SoundStore):
    """Breaks release frees all: a token of every request stays in use."""

    lost = 0

    def release(self, request: int) -> None:
        """Free all but one token of the request."""
        super().release(request)
        self.lost += 1

    def usage(self) -> Usage:
        """The tokens and requests in use, with the tokens that were not freed."""
        sound = super().usage()
        return Usage(
            tokens=min(sound.tokens + self.lost, sound.tokens_total),
            tokens_total=sound.tokens_total,
            requests=sound.requests,
            requests_total=sound.requests_total,
        )


class WastefulStore(SoundStore):
    """Breaks live bytes: reports one byte too many."""

    def live_bytes(self, request: int, tokens: int) -> int:
        """The bytes of the tensors, plus one."""
        return super().live_bytes(request, tokens) + 1


class StoreFamily(CacheFamily):
    """The cache family of one of these stores."""

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
"""For each law a cache that breaks it."""
