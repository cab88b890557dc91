"""Asynchronous scheduling, as in vLLM: a decode step is launched before the tokens of the previous step are known.

The device then does not idle while the host detokenizes, checks stop strings, returns outputs and schedules.

The sampled tokens of a step stay on the device, where the next step reads them as its input; the host processes a copy
while the next step runs. A sequence that ends with a sampled token is already part of the next step, whose result for
it is dropped. The token counts that penalties need are also kept, and updated, on the device. If the ranked candidates
do not suffice for `top_p`, which is only known once they are read, the running step holds that sequence without a valid
token: its result is dropped, and the position is computed again. Steps that need the newest tokens on the host
(grammars, drafts, beams) and steps that compute a prompt wait for the previous step.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from attn_core import Paged
from attn_core.stores import BranchingStore
from torch import Tensor

from attn_engine import sequence as sequences
from attn_engine.batch_sampler import SampledTokens, draw, may_fall_short
from attn_engine.fault_isolation import FaultIsolator
from attn_engine.graphs import DECODE
from attn_engine.host_numbers import concatenated, split_parts
from attn_engine.model_runner import ModelRunner
from attn_engine.output_processor import extended
from attn_engine.scheduler import ScheduledChunk, Scheduler
from attn_engine.sequence import SequenceOutput

log = logging.getLogger(__name__)


class CopyBack:
    """A non-blocking copy of device tensors [n] to the host; `read` returns their values in the format of `fetched`."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._lengths = [len(part) for part in parts]
        self._here = numbers = concatenated(parts)
        self._done: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._here.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[list[Any]]:
        """The values of each tensor; waits until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()
        return split_parts(self._here.tolist(), self._lengths)


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """A launched decode step: the tokens sampled for its sequences, on the device, and their `copy` to the host.

    `void` holds the numbers of the sequences whose input token in this step was wrong.
    """

    sequences: list[sequences.Sequence]
    sampled: SampledTokens
    copy: CopyBack
    void: set[int] = field(default_factory=set)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """The chunks that the step computes: one token of each sequence."""
        return [ScheduledChunk(sequence, 1) for sequence in self.sequences]


class AsyncSteps:
    """Launches decode steps ahead of the host; at most one step runs while another is launched.

    While a step of a sequence runs, its input token already counts as `computed`, and the sequence has no `pending`
    tokens.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, isolator: FaultIsolator, end_ids: Collection[int]
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._isolator = isolator
        self._end_ids = end_ids
        states = [spec for specs in runner.model.state_specs().values() for spec in specs.values()]
        self._fixed = any(not isinstance(spec, Paged) for spec in states)
        self._rewinds = isinstance(runner.store, BranchingStore)
        self._next: StepInFlight | None = None
        self.launched_ahead = 0
        """The number of steps that were launched while the previous step ran."""

    @property
    def reason(self) -> str | None:
        """A readable reason why steps cannot be launched ahead; None if they can."""
        runner = self._runner
        if runner.graphs is None:
            return "decode steps are not replayed as CUDA graphs"
        if DECODE in runner.graphs.reasons:
            return runner.graphs.reasons[DECODE]
        return "the model has states of fixed size, for which a step cannot be computed twice" if self._fixed else None

    def take(self) -> StepInFlight | None:
        """Return and clear the step that was launched ahead; None if there is none, or all its sequences have ended."""
        in_flight, self._next = self._next, None
        matters = in_flight is not None and any(map(self._scheduler.holds, in_flight.sequences))
        return in_flight if matters else None

    def launch(self, chunks: Sequence[ScheduledChunk]) -> StepInFlight | None:
        """Launch a scheduled step; None, changing nothing, if it must be computed synchronously."""
        if self.reason is not None or not chunks:
            return None
        if not all(chunk.length == 1 and not chunk.draft.tokens and self._suits(chunk.sequence) for chunk in chunks):
            return None
        return self._launched([chunk.sequence for chunk in chunks], None)

    def launch_after(self, in_flight: StepInFlight) -> None:
        """Launch the step after a running one, if every running sequence is part of that one and suits it."""
        rows = _rows_of(in_flight)
        if any(number not in rows for number in self._scheduler.running):
            return
        # A sequence whose last token is being sampled takes part in no further step.
        going = [one for one in self._scheduler.running.values() if len(one.tokens) + 1 < one.max_len]
        if all(self._suits(one) for one in going) and going and self._scheduler.continue_ahead(going):
            self._next = self._launched(going, in_flight)
            self.launched_ahead += self._next is not None

    def finish(self, in_flight: StepInFlight) -> list[SequenceOutput]:
        """Wait for the tokens of a step, and return the outputs of those of its sequences that have not ended since."""
        found = []
        choices = in_flight.sampled.choices(in_flight.copy.read())
        for place, (sequence, choice) in enumerate(zip(in_flight.sequences, choices, strict=True)):
            if not self._scheduler.holds(sequence) or sequence.number in in_flight.void:
                continue
            self._scheduler.prefixes.remember(sequence, len(sequence.tokens))
            if place in in_flight.sampled.short and self._next is not None and sequence in self._next.sequences:
                self._next.void.add(sequence.number)
                sequence.undo_last_token()
                cast("BranchingStore", self._runner.store).rewind(sequence.number, sequence.computed)
            found.append(extended(sequence, choice, self._end_ids))
        return found

    def _suits(self, sequence: sequences.Sequence) -> bool:
        """Whether the next token of a sequence can be sampled while its previous token is known only to the device."""
        request = sequence.request
        if sequence.scoring is not None or request.prefill_only or request.adapter is not None:
            return False
        ready = sequence.generated > 0 and not sequence.followers
        plain = sequence.params.num_beams == 1 and sequence.matcher is None and not sequence.request.bad_words
        plain = plain and (self._rewinds or not may_fall_short(sequence.params))
        return plain and ready and not self._isolator.isolates(sequence) and not self._scheduler.drafts(sequence)

    def _launched(self, going: Sequence[sequences.Sequence], after: StepInFlight | None) -> StepInFlight | None:
        """Launch a step of these sequences; None if that fails, in which case the caller must compute it."""
        by_number = {sequence.number: sequence for sequence in going}
        ordered = [by_number[number] for number in self._runner.store.order(list(by_number))]
        try:
            sampled = self._computed(ordered, after)
        except Exception:
            log.exception("a step of %d requests could not be launched ahead", len(ordered))
            return None
        if sampled is None:
            return None
        for sequence in ordered:
            sequence.computed += 1
        return StepInFlight(ordered, sampled, CopyBack(sampled.parts))

    def _computed(self, ordered: list[sequences.Sequence], after: StepInFlight | None) -> SampledTokens | None:
        graphs = self._runner.graphs
        if graphs is None:
            return None
        if after is None:
            hidden = graphs.run([ScheduledChunk(sequence, 1) for sequence in ordered])
            return None if hidden is None else self._sampled(ordered, hidden, [None] * len(ordered), None)
        rows, last = _rows_of(after), after.sampled.tokens
        places = [rows[sequence.number] for sequence in ordered]
        hidden = graphs.run_after(ordered, places, last)
        return None if hidden is None else self._sampled(ordered, hidden, places, last)

    def _sampled(
        self,
        ordered: Sequence[sequences.Sequence],
        hidden: Tensor,
        after: Sequence[int | None],
        last: Tensor | None,
    ) -> SampledTokens:
        """Sample the next token of each sequence, on the device.

        `last` [tokens] are the tokens of the previous step where the host does not know them yet; `after` gives the
        index in `last` of each sequence's newest token.
        """
        rows = range(len(ordered))
        if not any(sequence.needs_logits for sequence in ordered):
            found = self._runner.greedy_tokens(hidden, rows)
            if found is not None:
                return SampledTokens([found])
        logits = self._runner.logits(hidden, rows)
        asked = zip(ordered, after, strict=True)
        return draw(logits, [one.batch_row(logits.shape[-1], self._end_ids, after=row) for one, row in asked], last)


def _rows_of(in_flight: StepInFlight) -> dict[int, int]:
    """The row in a step of each sequence that is not void, by sequence number."""
    return {one.number: row for row, one in enumerate(in_flight.sequences) if one.number not in in_flight.void}
