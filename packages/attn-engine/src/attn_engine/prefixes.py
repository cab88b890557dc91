"""Beginnings that requests have in common, computed once."""

from __future__ import annotations

from attn_core.stores import PrefixStore, StateStore

from attn_engine.sequence import Sequence


class Prefixes:
    """Asks the store for what is remembered and tells it what to remember; does nothing where it cannot share.

    A sequence without a `scope` shares nothing.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store if isinstance(store, PrefixStore) else None

    def adopt(self, sequence: Sequence) -> None:
        """Skip what is remembered of a sequence that was just admitted; its last token is always computed."""
        if self._store is not None and sequence.scope is not None:
            sequence.computed = self._store.adopt(sequence.number, sequence.tokens[:-1], sequence.scope)

    def remember(self, sequence: Sequence, computed: int) -> None:
        """Let others have the states of the first `computed` tokens."""
        if self._store is not None and sequence.scope is not None:
            self._store.remember(sequence.number, sequence.tokens, computed, sequence.scope)

    def chunk(self, sequence: Sequence, length: int) -> int:
        """How many of the next `length` tokens to compute in one step; the store may say so of any sequence."""
        if self._store is None:
            return length
        shared = 0 if sequence.scope is None else len(sequence.tokens)
        return self._store.chunk(sequence.computed, length, shared)
