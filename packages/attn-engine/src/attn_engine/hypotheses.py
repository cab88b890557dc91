"""The sequences of a beam search: each holds the states of one hypothesis, and they are forked as it goes on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from attn_engine.adjust import Draw, adjust
from attn_engine.beams import Beams
from attn_engine.event import ScoredToken
from attn_engine.sampler import log_probabilities
from attn_engine.search import Hypothesis, Search
from attn_engine.sequence import Sequence


class Brancher(Protocol):
    """Where the states of sequences are."""

    def remove(self, sequence: Sequence) -> None:
        """Free the states of a sequence."""
        ...

    def branch(self, parent: Sequence, copy: Sequence) -> None:
        """Give a sequence that holds nothing the states of another."""
        ...


class Hypotheses:
    """One beam search. `running` is a gang: they are in the store together, or none of them is."""

    def __init__(self, beams: Beams, sequences: list[Sequence], end_ids: Collection[int]) -> None:
        self.leader, *self._spare = sequences
        self.running = [self.leader]
        self._end_ids = end_ids
        sampling = self.leader.sampling
        self._search = Search(beams, sampling.max_new_tokens, () if sampling.ignore_end else end_ids)
        for sequence in sequences:
            sequence.gang = self.running
            sequence.stand_with(self.leader)

    @property
    def ready(self) -> bool:
        """Whether what comes next is known for every hypothesis."""
        return all(sequence.logits is not None for sequence in self.running)

    @property
    def everyone(self) -> list[Sequence]:
        """The sequences of the search, those that hold no hypothesis now included."""
        return [*self.running, *self._spare]

    @property
    def computed_in_all(self) -> int:
        """Tokens computed for all hypotheses so far."""
        return sum(sequence.computed_in_all for sequence in self.everyone)

    def advance(self, brancher: Brancher) -> list[Hypothesis] | None:
        """Continue by one token; the best completions once the search has ended.

        Raises `FloatingPointError` where the model's logits are not finite numbers, `UserError` where a grammar cannot
        be followed any further.
        """
        rows = [sequence.logits for sequence in self.running if sequence.logits is not None]
        logits = torch.stack(rows).float()
        # One question for all: each answer waits for the device.
        if not bool(logits.amax(-1).isfinite().all()):
            raise FloatingPointError
        scores = torch.stack([self._scores(s, row) for s, row in zip(self.running, logits, strict=True)])
        ends = None
        if self.leader.guide is not None or self.leader.sampling.stop:
            running = list(self.running)

            def ends(place: int, token: int) -> bool:
                return running[place].would_end(token)

        chosen = self._search.step(scores, lambda place, token: self._describe(logits, place, token), ends)
        if self._search.done:
            return self._search.finished
        self._regroup(chosen, brancher)
        return None

    def finite(self, sequence: Sequence) -> bool:
        """Whether what comes next is known for this hypothesis, and numbers."""
        return sequence.logits is not None and bool(sequence.logits.amax().isfinite())

    def _scores(self, sequence: Sequence, logits: Tensor) -> Tensor:
        vocabulary, device = len(logits), logits.device
        draw = Draw(
            sequence.sampling,
            0,
            len(sequence.tokens),
            seen=sequence.seen(vocabulary, device),
            counts=sequence.counts(vocabulary, device),
            allowed=sequence.allowed(vocabulary, device, self._end_ids),
        )
        return adjust(logits.log_softmax(-1), draw)

    def _describe(self, logits: Tensor, place: int, token: int) -> ScoredToken:
        most = self.running[place].sampling.alternatives
        if most is None:
            return ScoredToken(token)
        ((own, likeliest),) = log_probabilities(logits[place : place + 1], [token], most)
        return ScoredToken(token, own, tuple(likeliest))

    def _regroup(self, chosen: list[tuple[int, int]], brancher: Brancher) -> None:
        """Give each hypothesis that goes on a sequence of its own: its parent's, or a copy of it."""
        parents = list(self.running)
        going_on = {place for place, _ in chosen}
        for place, sequence in enumerate(parents):
            if place not in going_on:
                brancher.remove(sequence)
                self._spare.append(sequence)
        heirs: list[Sequence] = []
        copies: list[tuple[Sequence, Sequence]] = []
        for place, _ in chosen:
            parent = parents[place]
            if parent in heirs:
                copies.append((parent, self._spare.pop()))
                heirs.append(copies[-1][1])
            else:
                heirs.append(parent)
        self.running[:] = heirs
        for parent, copy in copies:
            copy.become(parent)
            brancher.branch(parent, copy)
        for sequence, (_, token) in zip(heirs, chosen, strict=True):
            sequence.follow_token(token)
