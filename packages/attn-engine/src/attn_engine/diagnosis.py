"""Which layer made the logits of a request meaningless."""

from __future__ import annotations

import logging

from attn_core.errors import LayerFailed

from attn_engine.prefixes import Prefixes
from attn_engine.scheduler import Chunk
from attn_engine.sequence import Sequence
from attn_engine.step import Forward
from attn_engine.witness import Witness

log = logging.getLogger(__name__)


class Diagnosis:
    """Computes sequences that are about to end once more, from their beginning: the fault may be older than the step
    in which it showed."""

    def __init__(self, forward: Forward, prefixes: Prefixes, step_tokens: int) -> None:
        self._forward = forward
        self._prefixes = prefixes
        self._step_tokens = step_tokens

    def of(self, sequence: Sequence) -> LayerFailed | None:
        """The first layer that gives what is not finite; None where none does, or there is no room to look.

        The sequence must be in the store; its states are lost.
        """
        store, number = self._forward.store, sequence.number
        store.release(number)
        sequence.forget()
        if not store.admit(number):
            return None
        if not store.reserve(number, len(sequence.tokens)):
            return None
        with Witness(self._forward.model) as witness:
            try:
                self._forward.enter(number, sequence.request.source_ids)
                while sequence.pending and witness.failure is None:
                    length = self._prefixes.chunk(sequence, min(sequence.pending, self._step_tokens))
                    chunk = Chunk(sequence, length)
                    self._forward.run([chunk], witness)
                    sequence.computed += chunk.length
            except Exception as error:
                log.exception("request %s: its fault could not be looked for", sequence.id)
                return witness.blame(error)
        return witness.failure
