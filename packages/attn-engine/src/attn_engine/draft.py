"""A small model that guesses for a large one.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192. They accept a
drawn token with the ratio of two probabilities; here both models draw with the same random number of the position,
and a guess is right where they draw the same. What is drawn is then the very token that would have been drawn without a
guess, so a seed gives the same text however many tokens there was room to guess.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from attn_core import BranchingStore, LanguageModel, StateStore
from attn_core.errors import InvalidValue, WrongState

from attn_engine.adjust import Draw
from attn_engine.proposer import Wanted
from attn_engine.sampler import choose_tokens
from attn_engine.scheduler import Chunk
from attn_engine.sequence import Sequence as Growing
from attn_engine.step import Forward

log = logging.getLogger(__name__)


class Draft:
    """A decoder with a store of its own that was made for its states; implements `Proposer`.

    A sequence whose states find no room there, or that is longer than its context, is not guessed for. At most
    `step_tokens` tokens of prompts are read at a step. A draft that raises guesses no more.
    """

    def __init__(self, model: LanguageModel, store: StateStore, step_tokens: int = 256) -> None:
        self._forward = Forward(model, store)
        if self._forward.has_source:
            raise InvalidValue.of("draft", "a model that attends to a source", "a decoder")
        if not isinstance(store, BranchingStore):
            raise InvalidValue.of("draft", type(store).__name__, "a store that can take tokens back")
        self._store: StateStore = store
        self._branches: BranchingStore = store
        self._vocabulary = model.vocabulary
        self._context = model.context
        self._step_tokens = step_tokens
        self._trails: dict[int, Growing] = {}
        self._settled: dict[int, int] = {}
        self._broken = False

    def require_vocabulary(self, tokens: int) -> None:
        """Raises `InvalidValue` unless the draft knows exactly so many tokens."""
        if self._vocabulary != tokens:
            given = f"a model of {self._vocabulary} tokens"
            raise InvalidValue.of("draft", given, f"one of the same {tokens} tokens as the model")

    def propose(self, wanted: Sequence[Wanted], most: int) -> list[list[int]]:
        """See `Proposer.propose`."""
        guesses: list[list[int]] = [[] for _ in wanted]
        try:
            with torch.inference_mode():
                self._propose(wanted, most, guesses)
        except Exception:
            log.exception("the draft model failed and is not asked again")
            self._broken = True
            return [[] for _ in wanted]
        return guesses

    def forget(self, sequence: Growing) -> None:
        """See `Proposer.forget`."""
        if self._trails.pop(sequence.number, None) is not None:
            self._settled.pop(sequence.number, None)
            self._store.release(sequence.number)

    def _propose(self, wanted: Sequence[Wanted], most: int, guesses: list[list[int]]) -> None:
        places: dict[int, int] = {}
        room: dict[int, int] = {}
        for place, one in enumerate(wanted):
            length = min(one.most, most, self._context - len(one.sequence.tokens))
            if length > 0 and not self._broken and self._follow(one.sequence, length):
                places[one.sequence.number], room[one.sequence.number] = place, length
                most -= length
        trails = self._read([self._trails[number] for number in places])
        while trails:
            going_on = []
            for trail, token in trails:
                guess = guesses[places[trail.number]]
                if token < 0:
                    continue
                guess.append(token)
                if len(guess) < room[trail.number]:
                    trail.tokens.append(token)
                    going_on.append(trail)
            trails = self._compute([Chunk(trail, 1) for trail in going_on])

    def _follow(self, sequence: Growing, length: int) -> bool:
        """Let the states held for a sequence be those of its tokens, as far as they were computed; False without room.

        States of fixed size go back to the mark, so a few tokens behind it are computed again.
        """
        number = sequence.number
        trail = self._trails.get(number)
        if trail is None:
            if not self._store.admit(number):
                return False
            trail = self._trails[number] = Growing(sequence.request, number)
            trail.seed = sequence.seed
        right = self._settled.get(number, 0)
        while right < min(trail.computed, len(sequence.tokens) - 1) and trail.tokens[right] == sequence.tokens[right]:
            right += 1
        try:
            if right < trail.computed:
                trail.computed = self._branches.rewind(number, right)
        except WrongState:
            self.forget(sequence)
            return self._follow(sequence, length)
        trail.tokens = list(sequence.tokens)
        self._settled[number] = trail.computed
        if self._store.reserve(number, len(trail.tokens) + length):
            return True
        self.forget(sequence)
        return False

    def _read(self, trails: Sequence[Growing]) -> list[tuple[Growing, int]]:
        """Compute what is missing; the next token of those of which nothing is missing any more."""
        chunks: list[Chunk] = []
        left = self._step_tokens
        for trail in sorted(trails, key=lambda trail: trail.pending):
            length = min(trail.pending, left)
            if length > 0:
                chunks.append(Chunk(trail, length))
                left -= length
        found = self._compute(chunks)
        for trail, _ in found:
            self._branches.mark(trail.number, trail.computed)
        for chunk in chunks:
            self._settled[chunk.sequence.number] = chunk.sequence.computed
        return found

    def _compute(self, chunks: Sequence[Chunk]) -> list[tuple[Growing, int]]:
        if not chunks:
            return []
        ordered, hidden = self._forward.run(chunks)
        trails, rows, end = [], [], 0
        for chunk in ordered:
            end += chunk.length
            if chunk.completes:
                trails.append(chunk.sequence)
                rows.append(end - 1)
            chunk.sequence.computed += chunk.length
        if not trails:
            return []
        # Penalties and grammars are left to the model that checks.
        draws = [Draw(trail.sampling, trail.seed, len(trail.tokens)) for trail in trails]
        return list(zip(trails, choose_tokens(self._forward.logits(hidden, rows), draws), strict=True))
