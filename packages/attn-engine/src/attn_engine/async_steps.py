"""Decode steps that are launched before the tokens of the step before them are known, so that the device does not wait
while the host does what follows a step: texts, stop strings, outputs, and the plan of the next step.

The tokens of a step stay on the device, where the next step takes its own from them; the host gets a copy and looks at
it while the next step runs. A sequence that ends with a token is in the next step already: what that gives for it is
dropped. vLLM calls this asynchronous scheduling. What penalties look at stays on the device, too, and gets the newest
token there. Where the most likely tokens that are ranked do not suffice for `top_p`, which is seen when they are read,
the step that runs meanwhile has a sequence in it with no token: what that gives for it is dropped, and it is computed
again. Steps whose choice needs the newest tokens on the host - grammars, drafts, beams - wait for the step before them,
as do those in which a prompt is computed.
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
from attn_engine.batch_sampler import Drawn, draw, may_fall_short
from attn_engine.fault_isolation import FaultIsolator
from attn_engine.host_numbers import apart, joined
from attn_engine.model_runner import ModelRunner
from attn_engine.output_processor import extended
from attn_engine.scheduler import ScheduledChunk, Scheduler
from attn_engine.sequence import SequenceOutput

log = logging.getLogger(__name__)


class CopyBack:
    """Tensors [n] of a device on their way to the host, behind which the device goes on; as `fetched` gives them."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._lengths = [len(part) for part in parts]
        self._here = numbers = joined(parts)
        self._done: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._here.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[list[Any]]:
        """The numbers of each, once they are here."""
        if self._done is not None:
            self._done.synchronize()
        return apart(self._here.tolist(), self._lengths)


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """A decode step that was launched: what was drawn for each of the sequences, on the device and on its way.

    `void` are the numbers of sequences that are in it with a wrong token.
    """

    sequences: list[sequences.Sequence]
    drawn: Drawn
    copy: CopyBack
    void: set[int] = field(default_factory=set)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """What it computes."""
        return [ScheduledChunk(sequence, 1) for sequence in self.sequences]


class AsyncSteps:
    """Launches decode steps ahead of the host; at most one runs while another is launched.

    While a step of a sequence runs, the token that was computed counts as `computed`, and nothing is `pending`.
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
        """Steps that were launched while the one before them ran."""

    @property
    def reason(self) -> str | None:
        """Why no step is launched ahead, for people; None if some are."""
        runner = self._runner
        if runner.graphs is None:
            return "decode steps are not repeated as CUDA graphs"
        if runner.graphs.reason is not None:
            return runner.graphs.reason
        return "the model has states that cannot be computed twice" if self._fixed else None

    def take(self) -> StepInFlight | None:
        """The step that runs, if it still matters to anybody."""
        flying, self._next = self._next, None
        matters = flying is not None and any(map(self._scheduler.holds, flying.sequences))
        return flying if matters else None

    def launch(self, chunks: Sequence[ScheduledChunk]) -> StepInFlight | None:
        """Launch a step as it was scheduled; None where the host must wait for it, for which nothing has changed."""
        if self.reason is not None or not chunks:
            return None
        if not all(chunk.length == 1 and not chunk.draft.tokens and self._suits(chunk.sequence) for chunk in chunks):
            return None
        return self._launched([chunk.sequence for chunk in chunks], None)

    def launch_after(self, flying: StepInFlight) -> None:
        """Launch the step after one that runs, if all that is in the batch goes on in it."""
        rows = _rows_of(flying)
        if any(number not in rows for number in self._scheduler.running):
            return
        # Whose last token is being chosen is in no further step.
        going = [one for one in self._scheduler.running.values() if len(one.tokens) + 1 < one.max_len]
        if all(self._suits(one) for one in going) and going and self._scheduler.continue_ahead(going):
            self._next = self._launched(going, flying)
            self.launched_ahead += self._next is not None

    def finish(self, flying: StepInFlight) -> list[SequenceOutput]:
        """Wait for the tokens of a step; the outputs of its sequences, but for those that have ended meanwhile."""
        found = []
        choices = flying.drawn.choices(flying.copy.read())
        for place, (sequence, choice) in enumerate(zip(flying.sequences, choices, strict=True)):
            if not self._scheduler.holds(sequence) or sequence.number in flying.void:
                continue
            self._scheduler.prefixes.remember(sequence, len(sequence.tokens))
            if place in flying.drawn.short and self._next is not None and sequence in self._next.sequences:
                self._next.void.add(sequence.number)
                sequence.take_back()
                cast("BranchingStore", self._runner.store).rewind(sequence.number, sequence.computed)
            found.append(extended(sequence, choice, self._end_ids))
        return found

    def _suits(self, sequence: sequences.Sequence) -> bool:
        """Whether the next token of a sequence in decode can be chosen where the one before is known to the device
        alone."""
        request = sequence.request
        if sequence.scoring is not None or request.prefill_only or request.adapter is not None:
            return False
        ready = sequence.generated > 0 and not sequence.followers
        plain = sequence.params.num_beams == 1 and sequence.matcher is None
        plain = plain and (self._rewinds or not may_fall_short(sequence.params))
        return plain and ready and not self._isolator.isolates(sequence) and not self._scheduler.drafts(sequence)

    def _launched(self, going: Sequence[sequences.Sequence], after: StepInFlight | None) -> StepInFlight | None:
        """Launch a step of these sequences; None where that fails, and it is to be computed anew."""
        by_number = {sequence.number: sequence for sequence in going}
        ordered = [by_number[number] for number in self._runner.store.order(list(by_number))]
        try:
            drawn = self._computed(ordered, after)
        except Exception:
            log.exception("a step of %d requests could not be launched ahead", len(ordered))
            return None
        if drawn is None:
            return None
        for sequence in ordered:
            sequence.computed += 1
        return StepInFlight(ordered, drawn, CopyBack(drawn.parts))

    def _computed(self, ordered: list[sequences.Sequence], after: StepInFlight | None) -> Drawn | None:
        graphs = self._runner.graphs
        if graphs is None:
            return None
        if after is None:
            hidden = graphs.run([ScheduledChunk(sequence, 1) for sequence in ordered])
            return None if hidden is None else self._drawn(ordered, hidden, [None] * len(ordered), None)
        rows, last = _rows_of(after), after.drawn.tokens
        places = [rows[sequence.number] for sequence in ordered]
        hidden = graphs.run_after(ordered, places, last)
        return None if hidden is None else self._drawn(ordered, hidden, places, last)

    def _drawn(
        self,
        ordered: Sequence[sequences.Sequence],
        hidden: Tensor,
        after: Sequence[int | None],
        last: Tensor | None,
    ) -> Drawn:
        """The next token of each sequence, on the device; `last` [tokens] are the newest ones, where the host does not
        know them, of which each has that of number `after`."""
        rows = range(len(ordered))
        if not any(sequence.needs_logits for sequence in ordered):
            found = self._runner.greedy_tokens(hidden, rows)
            if found is not None:
                return Drawn([found])
        logits = self._runner.logits(hidden, rows)
        asked = zip(ordered, after, strict=True)
        return draw(logits, [one.batch_row(logits.shape[-1], self._end_ids, after=row) for one, row in asked], last)


def _rows_of(flying: StepInFlight) -> dict[int, int]:
    """The rows of sequences that are in a step with the token they have, by number."""
    return {one.number: row for row, one in enumerate(flying.sequences) if one.number not in flying.void}
