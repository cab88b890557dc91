"""Decode steps that are launched before the tokens of the step before them are known, so that the device does not wait
while the host does what follows a step: texts, stop strings, outputs, and the plan of the next step.

The tokens of a step stay on the device, where the next step takes its own from them; the host gets a copy and looks at
it while the next step runs. A sequence that ends with a token is in the next step already: what that gives for it is
dropped. vLLM calls this asynchronous scheduling. Steps whose choice needs the newest tokens on the host - grammars,
penalties, drafts, beams - and those whose answer is more than tokens wait for the step before them, as do those in
which a prompt is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from attn_core import Paged
from torch import Tensor

from attn_engine import sequence as sequences
from attn_engine.batch_sampler import choose_on_device, may_fall_short
from attn_engine.fault_isolation import FaultIsolator
from attn_engine.model_runner import ModelRunner
from attn_engine.output_processor import chosen_tokens, extended
from attn_engine.scheduler import ScheduledChunk, Scheduler
from attn_engine.sequence import SequenceOutput

log = logging.getLogger(__name__)


class CopyBack:
    """Integers [n] of a device on their way to the host, behind which the device goes on."""

    def __init__(self, numbers: Tensor) -> None:
        self._here = numbers
        self._done: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._here.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(numbers.device))

    def read(self) -> list[int]:
        """The integers, once they are here."""
        if self._done is not None:
            self._done.synchronize()
        found: list[int] = self._here.tolist()
        return found


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """A decode step that was launched: a token for each of the sequences, [sequences] on the device and on its way."""

    sequences: list[sequences.Sequence]
    tokens: Tensor
    copy: CopyBack

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
        rows = {sequence.number: row for row, sequence in enumerate(flying.sequences)}
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
        for sequence, token in zip(flying.sequences, flying.copy.read(), strict=True):
            if self._scheduler.holds(sequence):
                self._scheduler.prefixes.remember(sequence, len(sequence.tokens))
                found.append(extended(sequence, (token, None, ()), self._end_ids))
        return found

    def _suits(self, sequence: sequences.Sequence) -> bool:
        """Whether the next token of a sequence in decode depends on the one before through the model alone, and is all
        that is asked for."""
        request = sequence.request
        if sequence.scoring is not None or request.prefill_only or request.adapter is not None:
            return False
        params = sequence.params
        plain = (
            params.num_beams == 1
            and params.top_logprobs is None
            and params.repetition_penalty == 1
            and not sequence.penalizes_counts
            and sequence.matcher is None
            and not may_fall_short(params)
        )
        ready = sequence.generated > 0 and sequence.generated >= params.min_new_tokens and not sequence.followers
        return plain and ready and not self._isolator.isolates(sequence) and not self._scheduler.drafts(sequence)

    def _launched(self, going: Sequence[sequences.Sequence], after: StepInFlight | None) -> StepInFlight | None:
        """Launch a step of these sequences; None where that fails, and it is to be computed anew."""
        by_number = {sequence.number: sequence for sequence in going}
        ordered = [by_number[number] for number in self._runner.store.order(list(by_number))]
        try:
            tokens = self._computed(ordered, after)
        except Exception:
            log.exception("a step of %d requests could not be launched ahead", len(ordered))
            return None
        if tokens is None:
            return None
        for sequence in ordered:
            sequence.computed += 1
        return StepInFlight(ordered, tokens, CopyBack(tokens))

    def _computed(self, ordered: list[sequences.Sequence], after: StepInFlight | None) -> Tensor | None:
        graphs = self._runner.graphs
        if graphs is None:
            return None
        if after is None:
            hidden = graphs.run([ScheduledChunk(sequence, 1) for sequence in ordered])
        else:
            rows = {sequence.number: row for row, sequence in enumerate(after.sequences)}
            hidden = graphs.run_after(ordered, [rows[sequence.number] for sequence in ordered], after.tokens)
        return None if hidden is None else self._tokens(ordered, hidden, 0 if after is None else 1)

    def _tokens(self, ordered: Sequence[sequences.Sequence], hidden: Tensor, ahead: int) -> Tensor:
        """The next token of each sequence, on the device [sequences]."""
        rows = range(len(ordered))
        if not any(sequence.needs_logits for sequence in ordered):
            found = self._runner.greedy_tokens(hidden, rows)
            if found is not None:
                return found
        logits = self._runner.logits(hidden, rows)
        if logits.device.type == "cuda":
            size = logits.shape[-1]
            return choose_on_device(logits, [one.batch_row(size, self._end_ids, ahead=ahead) for one in ordered])
        return torch.tensor(chosen_tokens(ordered, logits, self._end_ids, self._runner.sampling, ahead=ahead))
