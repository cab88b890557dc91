"""Beginnings that requests have in common, computed once."""

from __future__ import annotations

from attn_core import PrefixStore, StateStore

from attn_engine.sequence import Sequence


class Prefixes:
    """Asks the store for what is remembered and tells it what to remember; does nothing where it cannot share.

    A request whose tokens are scored needs all of them computed, and one without a `scope` shares nothing.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store if isinstance(store, PrefixStore) else None

    def adopt(self, sequence: Sequence) -> None:
        """Skip what is remembered of a sequence that was just admitted; its last token is always computed."""
        scope = _scope(sequence)
        if self._store is not None and scope is not None:
            sequence.computed = self._store.adopt(sequence.number, sequence.tokens[:-1], scope)

    def remember(self, sequence: Sequence, computed: int) -> None:
        """Let others have the states of the first `computed` tokens."""
        scope = _scope(sequence)
        if self._store is not None and scope is not None:
            self._store.remember(sequence.number, sequence.tokens[:computed], scope)

    def chunk(self, sequence: Sequence, length: int) -> int:
        """How many of the next `length` tokens to compute in one step."""
        if self._store is None or _scope(sequence) is None:
            return length
        return self._store.chunk(sequence.computed, length, len(sequence.tokens))


def _scope(sequence: Sequence) -> str | None:
    """What a sequence shares within: its request's scope, and the source that its states depend on."""
    request = sequence.request
    if request.scope is None or sequence.scoring is not None:
        return None
    return f"{request.scope}\0{request.source_ids}"
