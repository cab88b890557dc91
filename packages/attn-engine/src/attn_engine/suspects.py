"""Steps that went wrong: whose fault it was is found by computing every request of the step alone.

States are taken back first, so that those who are innocent go on as if nothing had happened.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from attn_core.errors import InternalError, WrongState
from attn_core.stores import BranchingStore
from torch import Tensor

from attn_engine.scheduler import Chunk, Scheduler
from attn_engine.sequence import Sequence as Growing
from attn_engine.step import Forward
from attn_engine.witness import Witness

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Computed:
    """Chunks that were computed together, in batch order, and their hidden rows [tokens, width]."""

    chunks: list[Chunk]
    hidden: Tensor


@dataclass(frozen=True)
class Guilty:
    """A sequence that cannot be computed, and why."""

    sequence: Growing
    error: Exception


class Suspects:
    """Computes steps. A sequence of a step that failed is computed alone until it is past the place where it did."""

    def __init__(self, forward: Forward, scheduler: Scheduler) -> None:
        self._forward = forward
        self._scheduler = scheduler
        self._past: dict[int, int] = {}

    def run(self, chunks: Sequence[Chunk]) -> tuple[list[Computed], list[Guilty]]:
        """Compute the chunks, together where nobody is suspected; and those who are at fault."""
        trusted = [chunk for chunk in chunks if chunk.sequence.number not in self._past]
        suspected = [chunk for chunk in chunks if chunk.sequence.number in self._past]
        computed: list[Computed] = []
        if trusted:
            try:
                computed.append(Computed(*self._forward.run(trusted)))
            except Exception:
                log.exception("a step of %d requests failed; each is computed alone", len(trusted))
                suspected += self._taken_back(trusted)
        guilty: list[Guilty] = []
        for chunk in suspected:
            # One that has lost its states with its gang waits to be computed again.
            if self._scheduler.holds(chunk.sequence):
                self._alone(chunk, computed, guilty)
        return computed, guilty

    def forget(self, sequence: Growing) -> None:
        """It has ended."""
        self._past.pop(sequence.number, None)

    def _alone(self, chunk: Chunk, computed: list[Computed], guilty: list[Guilty]) -> None:
        number = chunk.sequence.number
        with Witness(self._forward.model) as witness:
            try:
                computed.append(Computed(*self._forward.run([chunk], witness)))
            except Exception as error:
                log.exception("request %s cannot be computed", chunk.sequence.id)
                unknown = InternalError(f"a step failed: {type(error).__name__}")
                guilty.append(Guilty(chunk.sequence, witness.blame(error) or unknown))
                return
        if chunk.start + chunk.rows >= self._past[number]:
            del self._past[number]

    def _taken_back(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those of the chunks that can be computed at once, as their states are again what they were."""
        store = self._forward.store
        ready: list[Chunk] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if not self._scheduler.holds(sequence):
                continue
            self._past[sequence.number] = chunk.start + chunk.rows
            start = sequence.computed
            try:
                if not isinstance(store, BranchingStore):
                    raise WrongState("the store takes nothing back")
                sequence.computed = store.rewind(sequence.number, start)
            except WrongState:
                self._scheduler.drop_states(sequence)
            else:
                ready += [chunk] if sequence.computed == start else []
        return ready
