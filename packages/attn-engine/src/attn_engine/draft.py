"""A small model that guesses for a large one.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192. They accept a
drawn token with the ratio of two probabilities; here both models draw with the same random number of the position,
and a guess is right where they draw the same. What is drawn is then the very token that would have been drawn without a
guess, so a seed gives the same text however many tokens there was room to guess.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from attn_core.errors import InvalidValue, WrongState
from attn_core.models import LanguageModel
from attn_core.stores import BranchingStore, StateStore

from attn_engine.adjust import Draw
from attn_engine.limits import MOST_BRANCHES
from attn_engine.proposer import Wanted
from attn_engine.sampler import choose_tokens
from attn_engine.scheduler import Chunk
from attn_engine.sequence import Sequence as Growing
from attn_engine.step import Forward
from attn_engine.token_tree import Growth, TokenTree

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

    def propose(self, wanted: Sequence[Wanted], most: int) -> list[TokenTree]:
        """See `Proposer.propose`.

        One chain is followed; where it may go on in several ways, the likeliest other tokens stand beside each of it.
        """
        growths: dict[int, Growth] = {}
        try:
            with torch.inference_mode():
                self._propose(wanted, most, growths)
        except Exception:
            log.exception("the draft model failed and is not asked again")
            self._broken = True
            return [TokenTree() for _ in wanted]
        return [growths[place].tree if place in growths else TokenTree() for place in range(len(wanted))]

    def forget(self, sequence: Growing) -> None:
        """See `Proposer.forget`."""
        if self._trails.pop(sequence.number, None) is not None:
            self._settled.pop(sequence.number, None)
            self._store.release(sequence.number)

    def _propose(self, wanted: Sequence[Wanted], most: int, growths: dict[int, Growth]) -> None:
        open_chains: dict[int, Chain] = {}
        for place, one in enumerate(wanted):
            length = min(one.most, most, self._context - len(one.sequence.tokens))
            if length > 0 and not self._broken and self._follow(one.sequence, length):
                growths[place] = Growth(min(length * one.branches, most))
                open_chains[one.sequence.number] = Chain(growths[place], length, one.branches)
                most -= growths[place].room
        likely = self._read([self._trails[number] for number in open_chains])
        while likely:
            going_on = []
            for trail, tokens in likely:
                if open_chains[trail.number].grow(tokens):
                    trail.tokens.append(tokens[0])
                    going_on.append(trail)
            likely = self._compute([Chunk(trail, 1) for trail in going_on])

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

    def _read(self, trails: Sequence[Growing]) -> list[tuple[Growing, list[int]]]:
        """Compute what is missing; the next tokens of those of which nothing is missing any more."""
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

    def _compute(self, chunks: Sequence[Chunk]) -> list[tuple[Growing, list[int]]]:
        """The token that follows each sequence that is complete, -1 where there is none, and other likely ones."""
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
        logits = self._forward.logits(hidden, rows)
        others = logits.topk(min(MOST_BRANCHES, self._vocabulary)).indices.tolist()
        return [
            (trail, [token, *other])
            for trail, token, other in zip(trails, choose_tokens(logits, draws), others, strict=True)
        ]


@dataclass
class Chain:
    """The guess that is being made for one sequence: a chain of `length` tokens, of `branches` kinds at each place."""

    growth: Growth
    length: int
    branches: int
    end: int = -1

    def grow(self, tokens: Sequence[int]) -> bool:
        """Go on with the first of these tokens, if it is one, and some of the others beside it; whether more is
        wanted."""
        node = self.growth.add(self.end, tokens[0]) if tokens[0] >= 0 else None
        if node is None:
            return False
        beside = [token for token in tokens[1:] if token != tokens[0]]
        for token in beside[: self.branches - 1]:
            self.growth.add(self.end, token)
        self.end = node
        self.length -= 1
        return self.length > 0 and self.growth.room > 0
