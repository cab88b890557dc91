"""Reuse of KV cache instead of recomputation: shared prefixes, and preempted sequences that are offloaded to memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from attn_core.errors import Incompatible, StateInvalid
from attn_core.stores import PortableStore, PrefixStore, StateStore

from attn_engine.sequence import Sequence
from attn_engine.state_transfer import PromptState, require_portable

log = logging.getLogger(__name__)


class PrefixCaching:
    """Reuses the KV cache of common prefixes if the store is a `PrefixStore`; does nothing otherwise.

    A sequence without a `scope` shares nothing.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store if isinstance(store, PrefixStore) else None

    def adopt(self, sequence: Sequence) -> None:
        """Reuse the cached prefix of a sequence that was just admitted; its last token is always computed."""
        if self._store is not None and sequence.scope is not None:
            sequence.computed = self._store.adopt(sequence.number, sequence.tokens[:-1], sequence.scope)

    def remember(self, sequence: Sequence, computed: int) -> None:
        """Make the KV cache of the first `computed` tokens available to other sequences of the same scope."""
        if self._store is not None and sequence.scope is not None:
            self._store.remember(sequence.number, sequence.tokens, computed, sequence.scope)

    def chunk(self, sequence: Sequence, length: int) -> int:
        """The number of the next `length` tokens to compute in one step, so that blocks can be shared.

        More than `length` where that would be a part of tokens that see each other.
        """
        if self._store is not None:
            shared = 0 if sequence.scope is None else len(sequence.tokens)
            length = self._store.chunk(sequence.computed, length, shared)
        given = sequence.request.prompt_embeddings
        group = None if given is None else given.group_around(sequence.computed + length)
        return length if group is None else group[1] - sequence.computed


@dataclass(frozen=True)
class OffloadedSequence:
    """The exported KV cache of `tokens`; `imported` is the state that it is from, if another engine computed it."""

    tokens: tuple[int, ...]
    exported: bytes
    imported: PromptState | None = None


class KVOffload:
    """Holds the KV cache of preempted sequences in at most `max_bytes` bytes; sequences that do not fit are recomputed.

    Whole sequences are swapped, as in Kwon et al. 2023 (arXiv 2309.06180, section 4.5). Sequences of stores that cannot
    export are recomputed. Prompt states that another engine computed are held here too, whatever their size, until
    their sequence is admitted.
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
        """The number of bytes held now."""
        return sum(len(offloaded.exported) for offloaded in self._offloaded.values())

    def save(self, sequence: Sequence) -> None:
        """Hold the KV cache of a sequence that is about to be preempted, if it fits and suffices to resume."""
        if self._exporter is None or not self._max_bytes or not _can_resume(sequence):
            return
        try:
            exported = self._exporter.export(sequence.number, sequence.computed)
        except Incompatible:  # The store's rows have no portable layout: its sequences are recomputed.
            return
        self.drop(sequence)
        if self.bytes + len(exported) <= self._max_bytes:
            offloaded = OffloadedSequence(tuple(sequence.tokens[: sequence.computed]), exported)
            self._offloaded[sequence.number] = offloaded

    def export(self, sequence: Sequence, computed_on: str) -> PromptState:
        """Export the state of a sequence whose tokens are all computed.

        Raises `Incompatible` for a store that is not portable, and what `PortableStore.export` raises.
        """
        return PromptState(
            exported=require_portable(self._store).export(sequence.number, sequence.computed),
            tokens=sequence.computed,
            digest=sequence.request.state_digest(sequence.computed),
            cached_tokens=sequence.cached_tokens,
            computed_on=computed_on,
        )

    def hold(self, sequence: Sequence, state: PromptState) -> None:
        """Hold a state that another engine computed until the sequence is admitted; ignore it if its tokens differ."""
        if sequence.request.state_digest(state.tokens) != state.digest or not 0 < state.tokens < len(sequence.tokens):
            log.warning(
                "request %s: the given state belongs to other tokens; the prompt is computed instead", sequence.id
            )
            return
        offloaded = OffloadedSequence(tuple(sequence.tokens[: state.tokens]), state.exported, state)
        self._offloaded[sequence.number] = offloaded

    def drop(self, sequence: Sequence) -> None:
        """Discard the KV cache held for the sequence, if any."""
        self._offloaded.pop(sequence.number, None)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the KV cache of the sequence is held; drops it if the sequence has other tokens by now."""
        offloaded = self._offloaded.get(sequence.number)
        if offloaded is None:
            return False
        if tuple(sequence.tokens[: len(offloaded.tokens)]) != offloaded.tokens:
            self.drop(sequence)
            return False
        return True

    def reload(self, sequence: Sequence, room: int) -> None:
        """Restore the held KV cache of a sequence that was just admitted with room for `room` tokens to the store."""
        if self._exporter is None or not self.holds(sequence):
            return
        offloaded = self._offloaded.pop(sequence.number)
        # No more is reserved again than is released here, so these calls always find room.
        self._store.release(sequence.number)
        try:
            sequence.computed = self._exporter.restore(sequence.number, offloaded.exported)
        except (StateInvalid, Incompatible) as error:
            if offloaded.imported is None:
                raise
            log.warning(
                "request %s: the given state was rejected, so the prompt is computed: %s", sequence.id, error.message
            )
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
    """Whether a sequence can resume from its KV cache alone.

    Scoring needs every token to be computed, and the logits of a beam without pending tokens are not cached.
    """
    written = sequence.encoder_written or sequence.request.encoder_input is None
    return written and sequence.scoring is None and sequence.computed > 0 and sequence.pending > 0
