"""Isolation of failing steps: the request at fault is found, and only that one ends.

When a step of several requests raises, their KV cache is rolled back and each is computed alone, so that the others
continue unaffected; running out of memory is handled in the same way. When logits are not finite, the layer at fault is
found by recomputing the sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from attn_core.errors import InternalError, LayerFailed, Unavailable, WrongState
from attn_core.stores import BranchingStore
from torch import Tensor

from attn_engine import sequence as sequences
from attn_engine.kv_reuse import PrefixCaching
from attn_engine.model_runner import ModelRunner
from attn_engine.nan_tracer import NanTracer
from attn_engine.out_of_memory import is_out_of_memory, out_of_memory, release_memory
from attn_engine.scheduler import ScheduledChunk, Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ComputedChunks:
    """Chunks computed in one batch, in batch order, and their hidden states [tokens, hidden_size]."""

    chunks: list[ScheduledChunk]
    hidden: Tensor


@dataclass(frozen=True)
class FailedSequence:
    """A sequence that cannot be computed, and the error."""

    sequence: sequences.Sequence
    error: Exception


class FaultIsolator:
    """Computes steps. Each sequence of a step that failed is computed alone until it is past the failed position."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._alone_until: dict[int, int] = {}

    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[ComputedChunks], list[FailedSequence]]:
        """Compute the chunks, in one batch except for sequences of a failed step.

        Returns the computed chunks, by batch, and the sequences that failed.
        """
        together = [chunk for chunk in chunks if chunk.sequence.number not in self._alone_until]
        alone = [chunk for chunk in chunks if chunk.sequence.number in self._alone_until]
        computed: list[ComputedChunks] = []
        full = False
        if together:
            try:
                computed.append(ComputedChunks(*self._runner.run(together)))
            except Exception as error:
                full = is_out_of_memory(error)
                if full:
                    rows = sum(chunk.rows for chunk in together)
                    said = "no memory for a step of %d tokens of %d requests; each is computed alone: %s"
                    log.warning(said, rows, len(together), error)
                else:
                    log.exception("a step of %d requests failed; each is computed alone", len(together))
                alone += self._rolled_back(together)
        if full:
            release_memory(self._runner.device)
        failed: list[FailedSequence] = []
        for chunk in alone:
            # A sequence that was sent back to waiting, with those co-scheduled, is recomputed later.
            if self._scheduler.holds(chunk.sequence):
                self._run_alone(chunk, computed, failed)
        return computed, failed

    def isolates(self, sequence: sequences.Sequence) -> bool:
        """Whether a sequence is currently computed alone."""
        return sequence.number in self._alone_until

    def forget(self, sequence: sequences.Sequence) -> None:
        """Note that a sequence has ended."""
        self._alone_until.pop(sequence.number, None)

    def _run_alone(self, chunk: ScheduledChunk, computed: list[ComputedChunks], failed: list[FailedSequence]) -> None:
        number = chunk.sequence.number
        with NanTracer(self._runner.model) as tracer:
            try:
                computed.append(ComputedChunks(*self._runner.run([chunk], tracer)))
            except Exception as error:
                log.exception("request %s cannot be computed", chunk.sequence.id)
                failed.append(FailedSequence(chunk.sequence, self._error(error, chunk, tracer)))
        if failed and failed[-1].sequence is chunk.sequence:
            release_memory(self._runner.device)
            return
        if chunk.start + chunk.rows >= self._alone_until[number]:
            del self._alone_until[number]

    def _error(self, error: Exception, chunk: ScheduledChunk, tracer: NanTracer) -> Exception:
        if is_out_of_memory(error):
            return out_of_memory(error, self._runner.device, f"a step of {chunk.rows} tokens of one request")
        if isinstance(error, Unavailable):
            return error  # a part of the engine, such as another rank, is gone: not the fault of a request
        return tracer.blame(error) or InternalError(f"a step failed: {type(error).__name__}")

    def _rolled_back(self, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """Roll back the KV caches of a failed batch; returns the chunks that can be computed again immediately."""
        store = self._runner.store
        ready: list[ScheduledChunk] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if not self._scheduler.holds(sequence):
                continue
            self._alone_until[sequence.number] = chunk.start + chunk.rows
            start = sequence.computed
            try:
                if not isinstance(store, BranchingStore):
                    raise WrongState("the cache cannot be rolled back")
                sequence.computed = store.rewind(sequence.number, start)
            except WrongState:
                self._scheduler.drop_states(sequence)
            else:
                ready += [chunk] if sequence.computed == start else []
        return ready


class FaultDiagnosis:
    """Finds the layer at fault by recomputing a sequence from its beginning, as the fault may be older than the step in
    which it showed."""

    def __init__(self, runner: ModelRunner, prefixes: PrefixCaching, max_num_batched_tokens: int) -> None:
        self._runner = runner
        self._prefixes = prefixes
        self._max_batched = max_num_batched_tokens

    def layer_at_fault(self, sequence: sequences.Sequence) -> LayerFailed | None:
        """The first layer whose values are not finite; None if there is none, or no room to recompute.

        The sequence must be in the store; its KV cache is discarded.
        """
        store, number = self._runner.store, sequence.number
        store.release(number)
        sequence.lost_states()
        if not store.admit(number):
            return None
        if not store.reserve(number, len(sequence.tokens)):
            return None
        with NanTracer(self._runner.model) as tracer:
            try:
                self._runner.encode(number, sequence.request.encoder_input)
                while sequence.pending and tracer.failure is None:
                    length = self._prefixes.chunk(sequence, min(sequence.pending, self._max_batched))
                    chunk = ScheduledChunk(sequence, length)
                    self._runner.run([chunk], tracer)
                    sequence.computed += chunk.length
            except Exception as error:
                log.exception("request %s: the layer at fault could not be found", sequence.id)
                return tracer.blame(error)
        return tracer.failure
