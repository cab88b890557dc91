"""KV cache that is reused instead of recomputed: common prefixes, and preempted sequences offloaded to memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from attn_core.errors import Incompatible, StateInvalid
from attn_core.stores import PortableStore, PrefixStore, StateStore

from attn_engine.moved_prompts import PromptState, require_portable
from attn_engine.sequence import Sequence

log = logging.getLogger(__name__)


class PrefixCaching:
    """Reuses the KV cache of common prefixes, if the store is a `PrefixStore`; does nothing otherwise.

    A sequence without a `scope` shares nothing.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store if isinstance(store, PrefixStore) else None

    def adopt(self, sequence: Sequence) -> None:
        """Skip the cached prefix of a sequence that was just admitted; its last token is always computed."""
        if self._store is not None and sequence.scope is not None:
            sequence.computed = self._store.adopt(sequence.number, sequence.tokens[:-1], sequence.scope)

    def remember(self, sequence: Sequence, computed: int) -> None:
        """Let others reuse the first `computed` tokens."""
        if self._store is not None and sequence.scope is not None:
            self._store.remember(sequence.number, sequence.tokens, computed, sequence.scope)

    def chunk(self, sequence: Sequence, length: int) -> int:
        """How many of the next `length` tokens to compute in one step, so that blocks can be shared."""
        if self._store is None:
            return length
        shared = 0 if sequence.scope is None else len(sequence.tokens)
        return self._store.chunk(sequence.computed, length, shared)


@dataclass(frozen=True)
class OffloadedSequence:
    """The exported KV cache of these tokens; `imported` where another engine computed it."""

    tokens: tuple[int, ...]
    exported: bytes
    imported: PromptState | None = None


class KVOffload:
    """Holds the KV cache of preempted sequences in at most `max_bytes` bytes; what does not fit is recomputed.

    Whole sequences are swapped, as in Kwon et al. 2023 (arXiv 2309.06180, section 4.5). Stores that cannot export
    recompute. What another engine computed of a prompt is held here too, whatever its size, until its sequence is
    admitted.
    """

    def __init__(self, store: StateStore, max_bytes: int) -> None:
        self._store = store
        self._exporter = store if isinstance(store, PortableStore) else None
        self._max_bytes = max_bytes
        self._offloaded: dict[int, OffloadedSequence] = {}
        self.reloaded_tokens = 0
        self.imported_tokens = 0

    @property
    def bytes(self) -> int:
        """Bytes held now."""
        return sum(len(offloaded.exported) for offloaded in self._offloaded.values())

    def save(self, sequence: Sequence) -> None:
        """Hold the KV cache of a sequence that is about to be preempted, if it is complete and fits."""
        if self._exporter is None or not self._max_bytes or not _can_resume(sequence):
            return
        try:
            exported = self._exporter.export(sequence.number, sequence.computed)
        except Incompatible:  # A store whose rows have no common layout: its sequences are recomputed.
            return
        self.drop(sequence)
        if self.bytes + len(exported) <= self._max_bytes:
            offloaded = OffloadedSequence(tuple(sequence.tokens[: sequence.computed]), exported)
            self._offloaded[sequence.number] = offloaded

    def export(self, sequence: Sequence, computed_on: str) -> PromptState:
        """The state of a sequence of which all tokens are computed. Raises what `PortableStore.export` raises."""
        return PromptState(
            exported=require_portable(self._store).export(sequence.number, sequence.computed),
            tokens=sequence.computed,
            digest=sequence.request.state_digest(sequence.computed),
            cached_tokens=sequence.cached_tokens,
            computed_on=computed_on,
        )

    def hold(self, sequence: Sequence, state: PromptState) -> None:
        """Hold a state that another engine computed, until the sequence is admitted; not one of other tokens."""
        if sequence.request.state_digest(state.tokens) != state.digest or not 0 < state.tokens < len(sequence.tokens):
            log.warning("request %s: the state that was given is of other tokens; they are computed", sequence.id)
            return
        offloaded = OffloadedSequence(tuple(sequence.tokens[: state.tokens]), state.exported, state)
        self._offloaded[sequence.number] = offloaded

    def drop(self, sequence: Sequence) -> None:
        """Hold nothing of the sequence any more."""
        self._offloaded.pop(sequence.number, None)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the KV cache of the sequence is held; that of other tokens than it has now is dropped."""
        offloaded = self._offloaded.get(sequence.number)
        if offloaded is None:
            return False
        if tuple(sequence.tokens[: len(offloaded.tokens)]) != offloaded.tokens:
            self.drop(sequence)
            return False
        return True

    def reload(self, sequence: Sequence, room: int) -> None:
        """Put the held KV cache of a sequence, just admitted with room for that many tokens, back into the store."""
        if self._exporter is None or not self.holds(sequence):
            return
        offloaded = self._offloaded.pop(sequence.number)
        # What is reserved again is no more than what is released here, so all calls find room.
        self._store.release(sequence.number)
        try:
            sequence.computed = self._exporter.restore(sequence.number, offloaded.exported)
        except (StateInvalid, Incompatible) as error:
            if offloaded.imported is None:
                raise
            log.warning("request %s: the state that was given is refused: %s", sequence.id, error.message)
            self._store.admit(sequence.number)
            self._store.reserve(sequence.number, room)
            return
        self._store.reserve(sequence.number, room)
        sequence.encoder_written = sequence.request.encoder_input is not None
        if offloaded.imported is None:
            self.reloaded_tokens += sequence.computed
        else:
            self.imported_tokens += sequence.computed
            sequence.cached_tokens += offloaded.imported.cached_tokens


def _can_resume(sequence: Sequence) -> bool:
    """Whether the next step needs only the KV cache: scoring needs every token computed, and a beam with nothing left
    to compute has logits that are in no cache."""
    written = sequence.encoder_written or sequence.request.encoder_input is None
    return written and sequence.scoring is None and sequence.computed > 0 and sequence.pending > 0
