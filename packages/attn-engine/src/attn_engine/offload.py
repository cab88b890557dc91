"""States of sequences that had to leave the store, kept as bytes until there is room for them again."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.errors import Incompatible
from attn_core.stores import PortableStore, StateStore

from attn_engine.sequence import Sequence


@dataclass(frozen=True)
class Kept:
    """The exported states of these tokens."""

    tokens: tuple[int, ...]
    exported: bytes


class Offload:
    """Keeps at most `most_bytes` bytes of states outside the store; what is not kept is computed again.

    A swap of whole requests, as Kwon et al. 2023 (arXiv 2309.06180, section 4.5) do with pages.
    """

    def __init__(self, store: StateStore, most_bytes: int) -> None:
        self._store = store
        self._exports = store if isinstance(store, PortableStore) else None
        self._most_bytes = most_bytes
        self._kept: dict[int, Kept] = {}
        self.reloaded_tokens = 0

    @property
    def bytes(self) -> int:
        """Bytes that are kept now."""
        return sum(len(kept.exported) for kept in self._kept.values())

    def keep(self, sequence: Sequence) -> None:
        """Keep the states of a sequence that is about to leave, if they are all there and there is room."""
        if self._exports is None or not self._most_bytes or not _whole(sequence):
            return
        try:
            exported = self._exports.export(sequence.number, sequence.computed)
        except Incompatible:  # A store whose rows have no common layout: its sequences are computed again.
            return
        self.drop(sequence)
        if self.bytes + len(exported) <= self._most_bytes:
            self._kept[sequence.number] = Kept(tuple(sequence.tokens[: sequence.computed]), exported)

    def drop(self, sequence: Sequence) -> None:
        """Keep nothing of the sequence any more."""
        self._kept.pop(sequence.number, None)

    def holds(self, sequence: Sequence) -> bool:
        """Whether states of the sequence are kept; those of other tokens than it has by now are dropped."""
        kept = self._kept.get(sequence.number)
        if kept is None:
            return False
        if tuple(sequence.tokens[: len(kept.tokens)]) != kept.tokens:
            self.drop(sequence)
            return False
        return True

    def reload(self, sequence: Sequence, room: int) -> None:
        """Put what is kept of a sequence, just admitted with room for so many tokens, back into the store."""
        if self._exports is None or not self.holds(sequence):
            return
        kept = self._kept.pop(sequence.number)
        # What is taken again is no more than what is given back here, so both calls find room.
        self._store.release(sequence.number)
        sequence.computed = self._exports.restore(sequence.number, kept.exported)
        self._store.reserve(sequence.number, room)
        sequence.entered = sequence.request.source_ids is not None
        self.reloaded_tokens += sequence.computed


def _whole(sequence: Sequence) -> bool:
    """Whether the next step could go on from the states alone: of a scored sequence every token must be computed, and
    one that waits for its gang with nothing left to compute has logits that are in no state."""
    written = sequence.entered or sequence.request.source_ids is None
    return written and sequence.scoring is None and sequence.computed > 0 and sequence.pending > 0
