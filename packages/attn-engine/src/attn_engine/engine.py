"""Continuous batching: requests join and leave a running batch between any two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from attn_core.errors import AlreadyExists, InvalidValue, OutOfCapacity, Unavailable, UserError
from attn_core.models import LanguageModel, Tokenizer
from attn_core.stores import BranchingStore, StateStore, TreeStore
from torch import Tensor

from attn_engine.detokenize import Detokenizer
from attn_engine.diagnosis import Diagnosis
from attn_engine.draft import Draft
from attn_engine.event import Event, FinishReason
from attn_engine.group import Group
from attn_engine.guide import Guides
from attn_engine.hypotheses import Hypotheses
from attn_engine.limits import EngineLimits, Load
from attn_engine.outcome import NOT_FINITE, NoTokenError, Progress
from attn_engine.progress import advance, ended
from attn_engine.proposer import LookupProposer
from attn_engine.request import ModelLimits, Request
from attn_engine.sampling import Sampling
from attn_engine.scheduler import Chunk, Scheduler
from attn_engine.sequence import Sequence
from attn_engine.step import Forward
from attn_engine.suspects import Suspects
from attn_engine.tally import Tally

log = logging.getLogger(__name__)


class Engine:
    """Runs the requests of one model. Not thread-safe: one thread submits, cancels and steps (see `EngineLoop`).

    `store` was made for `model.state_specs()`. Without a `tokenizer` events carry no text, stop strings are refused and
    nothing but the number of tokens ends a request. `clock` gives the time that deadlines are compared with, seconds.
    A `draft` of the same vocabulary guesses, in place of what followed the same words before.
    """

    def __init__(
        self,
        model: LanguageModel,
        store: StateStore,
        tokenizer: Tokenizer | None = None,
        limits: EngineLimits = EngineLimits(),  # noqa: B008  (frozen)
        clock: Callable[[], float] = time.monotonic,
        draft: Draft | None = None,
    ) -> None:
        if draft is not None:
            draft.require_vocabulary(model.vocabulary)
        self._forward = Forward(model, store)
        self._store = store
        self._tokenizer = tokenizer
        self._guides = Guides(tokenizer)
        self._end_ids = tokenizer.end_ids if tokenizer else frozenset()
        self.limits = limits
        self._clock = clock
        self._scheduler = Scheduler(store, limits, draft or LookupProposer())
        self._suspects = Suspects(self._forward, self._scheduler)
        self._diagnosis = Diagnosis(self._forward, self._scheduler.prefixes, limits.step_tokens)
        self._fit = ModelLimits(
            vocabulary=model.vocabulary, context=model.context, source_context=self._forward.source_context
        )
        self._groups: dict[str, Group] = {}
        self._news: list[Event] = []
        self._numbers = 0
        self._draining = False
        self._tally = Tally()
        if self.limits_note:
            log.warning(self.limits_note)

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running and no news is left to tell."""
        return not self._groups and not self._news

    @property
    def tree_unsupported_reason(self) -> str | None:
        """Why a guess cannot be a tree, for people; None if it can (`EngineLimits.branches`)."""
        store = self._store
        return store.tree_unsupported_reason() if isinstance(store, TreeStore) else "the cache holds no token trees"

    @property
    def limits_note(self) -> str:
        """What of its limits cannot be, for people; empty where all can."""
        wished = self.limits.branches > 1 and self.tree_unsupported_reason
        return f"guesses are chains, not trees: {wished}" if wished else ""

    def check(self, request: Request) -> None:
        """Raise the `UserError` that `submit` would raise for a request that can never run. Thread-safe."""
        self._fit.check(request)
        if self._tokenizer is None and isinstance(request.task, Sampling) and request.task.stop:
            raise InvalidValue.of("stop", request.task.stop, "none, as the engine has no tokenizer")
        if isinstance(request.task, Sampling) and request.task.grammar is not None:
            self._guides.check(request.task.grammar)
        tokens = len(request.token_ids) + request.new_tokens
        if not self._store.fits(tokens):
            raise InvalidValue.of("token_ids", f"{tokens} tokens with those to come", "what the model's cache can hold")
        if isinstance(request.task, Sampling) and request.task.beams is not None:
            self._check_beams(request.task.beams.width, tokens)

    def _check_beams(self, width: int, tokens: int) -> None:
        if not isinstance(self._store, BranchingStore):
            raise InvalidValue.of("beams", width, "none, as the engine's cache cannot fork a request")
        if not self._store.holds(width, tokens) or width > self._fit.vocabulary:
            given = f"{width} hypotheses of up to {tokens} tokens"
            raise InvalidValue.of("beams.width", given, "what the model's cache can hold together")

    def submit(self, request: Request) -> str:
        """Accept a request; its id is returned.

        Raises `InvalidValue` or `ContextLengthExceeded` for a request that can never run, `AlreadyExists` for an id in
        use, `OutOfCapacity` where too many wait, `Unavailable` after `drain`.
        """
        if self._draining:
            raise Unavailable("the engine takes no new requests: it is shutting down")
        self.check(request)
        if request.id in self._groups:
            raise AlreadyExists(f"a request with the id {request.id!r} is running", id=request.id)
        if len(self._scheduler.waiting) >= self.limits.waiting:
            raise OutOfCapacity(f"{self.limits.waiting} requests are waiting already", waiting=self.limits.waiting)
        members = [self._sequence(request, choice) for choice in range(request.completions)]
        beams = self._hypotheses(request)
        self._groups[request.id] = Group(list(members), beams)
        if beams is None:
            leader, *leader.followers = members
        else:
            leader = beams.leader
        self._scheduler.add(leader)
        return request.id

    def cancel(self, id: str) -> bool:  # noqa: A002  (the field's name)
        """Free all that the request holds, now; the next step tells. False if it is not known or has ended."""
        if id not in self._groups:
            return False
        self._end(id, FinishReason.CANCELLED)
        return True

    def step(self) -> list[Event]:
        """Compute one step for as many requests as fit; returns all news since the last step."""
        self._drop_late()
        with torch.inference_mode():
            chunks = self._admitted(self._scheduler.plan())
            if chunks:
                self._compute(chunks)
        news, self._news = self._news, []
        return news

    def load(self) -> Load:
        """How busy the engine is."""
        return self._tally.load(self._scheduler, self._store.usage())

    def drain(self) -> None:
        """Refuse new requests from now on; those accepted run to their end as `step` is called."""
        self._draining = True

    def fail_all(self, error: Exception) -> None:
        """End every request as failed and free everything, after an error that cannot be laid to one of them."""
        for request in list(self._groups):
            self._end(request, FinishReason.FAILED, error)

    def _drop_late(self) -> None:
        now = self._clock()
        late = [name for name, group in self._groups.items() if group.deadline is not None and now >= group.deadline]
        for request in late:
            self._end(request, FinishReason.DEADLINE)

    def _sequence(self, request: Request, choice: int) -> Sequence:
        self._numbers += 1
        text = Detokenizer(self._tokenizer, request.token_ids) if self._tokenizer else None
        sequence = Sequence(request, self._numbers, text, choice)
        if isinstance(request.task, Sampling) and request.task.grammar is not None:
            sequence.guide = self._guides.guide(request.task.grammar)
        return sequence

    def _admitted(self, chunks: list[Chunk]) -> list[Chunk]:
        """Encode the sources of newcomers; one whose source cannot be encoded fails alone."""
        if not self._forward.has_source:
            return chunks
        ready = []
        for chunk in chunks:
            sequence = chunk.sequence
            try:
                if not sequence.entered:
                    self._forward.enter(sequence.number, sequence.request.source_ids)
                    sequence.entered = True
            except Exception as error:
                log.exception("request %s: the source could not be encoded", sequence.id)
                self._end(sequence.id, FinishReason.FAILED, error)
            else:
                ready.append(chunk)
        return ready

    def _hypotheses(self, request: Request) -> Hypotheses | None:
        if not isinstance(request.task, Sampling) or request.task.beams is None:
            return None
        sequences = [self._sequence(request, 0) for _ in range(request.task.beams.width)]
        return Hypotheses(request.task.beams, sequences, self._end_ids)

    def _compute(self, chunks: list[Chunk]) -> None:
        computed, guilty = self._suspects.run(chunks)
        for step in computed:
            # Others of its request may have failed in between, and it with them.
            if all(self._scheduler.holds(chunk.sequence) for chunk in step.chunks):
                self._advance(step.chunks, step.hidden)
        for found in guilty:
            if found.sequence.id in self._groups:
                self._end(found.sequence.id, FinishReason.FAILED, found.error)
        for request in {chunk.sequence.id: None for chunk in chunks}:
            group = self._groups.get(request)
            if group is not None and group.beams is not None and group.beams.ready:
                self._search(request, group.members, group.beams)

    def _advance(self, ordered: list[Chunk], hidden: Tensor) -> None:
        guessing = []
        for chunk in ordered:
            sequence = chunk.sequence
            sequence.computed_in_all += chunk.rows
            if chunk.guess.tokens:
                guessing.append(chunk)
            else:
                self._scheduler.prefixes.remember(sequence, sequence.computed + chunk.length)
        self._tally.computed += len(hidden)
        for progress in advance(self._forward, ordered, hidden, self._end_ids, self._scheduler.fork):
            sequence = progress.sequence
            if sequence.id not in self._groups:
                continue
            self._tally.generated += 0 if sequence.scoring else len(progress.tokens)
            if progress.reason is FinishReason.FAILED:
                error = progress.error
                error = self._diagnosis.of(sequence) or error if isinstance(error, NoTokenError) else error
                self._tell(progress._replace(error=error))
                if sequence.id in self._groups:
                    self._end(sequence.id, FinishReason.FAILED, error)
            elif progress.tokens or progress.text or progress.reason:
                self._tell(progress)
        self._remember_guessed(guessing)

    def _remember_guessed(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            sequence = chunk.sequence
            self._tally.guessed += len(chunk.guess)
            self._tally.accepted += sequence.accepted - chunk.accepted_before
            if self._scheduler.holds(sequence):
                self._scheduler.prefixes.remember(sequence, sequence.computed)

    def _search(self, request: str, members: list[Sequence], beams: Hypotheses) -> None:
        """Take a beam search one token further; tell what it has found when it ends."""
        try:
            found = beams.advance(self._scheduler)
        except UserError as error:
            self._end(request, FinishReason.FAILED, error)
            return
        except FloatingPointError:
            sick = next(sequence for sequence in beams.running if not beams.finite(sequence))
            self._end(request, FinishReason.FAILED, self._diagnosis.of(sick) or NoTokenError(NOT_FINITE))
            return
        if found is None:
            return
        if len(found) < len(members):
            few = UserError(f"the beam search found {len(found)} completions of the {len(members)} that were asked for")
            self._end(request, FinishReason.FAILED, few)
            return
        members[0].computed_in_all = beams.computed_in_all
        members[0].adopted_in_all = beams.leader.adopted_in_all
        for member, hypothesis in zip(list(members), found, strict=False):
            self._tally.generated += len(hypothesis.tokens)
            self._tell(ended(member, hypothesis, self._end_ids))

    def _end(self, request: str, reason: FinishReason, error: Exception | None = None) -> None:
        """End all that is left of a request."""
        for sequence in list(self._groups[request].members):
            self._tell(Progress(sequence, (), sequence.remaining_text(), reason, error))

    def _tell(self, progress: Progress) -> None:
        sequence = progress.sequence
        group = self._groups[sequence.id]
        if progress.reason is not None:
            self._scheduler.remove(sequence)
            self._suspects.forget(sequence)
            group.remove(sequence)
            if not group.members:
                del self._groups[sequence.id]
                for held in group.held:
                    self._scheduler.remove(held)
                    self._suspects.forget(held)
        event = Event(
            request=sequence.id,
            choice=sequence.choice,
            tokens=progress.tokens,
            text=progress.text,
            finish=sequence.finish(progress.reason, progress.error) if progress.reason else None,
            usage=group.usage,
        )
        self._news.append(event)
