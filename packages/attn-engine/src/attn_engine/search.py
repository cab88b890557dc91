"""The choices of a beam search, without the states that they need.

Graves 2012, "Sequence Transduction with Recurrent Neural Networks", arXiv 1211.3711, section 2.5; the length penalty is
that of Wu et al. 2016, arXiv 1609.08144, section 7, with the plain length in place of (5 + length) / 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_engine.beams import Beams
from attn_engine.event import ScoredToken


@dataclass(frozen=True)
class Hypothesis:
    """New tokens and their score: while it can go on, the sum of log-probabilities, then that sum after the penalty."""

    tokens: tuple[ScoredToken, ...]
    score: float


Candidate = tuple[float, int, int]
"""Score, place of the hypothesis and token of a continuation."""

Describe = Callable[[int, int], ScoredToken]
"""What is told of a token that continues the hypothesis of this place."""


Ends = Callable[[int, int], bool]
"""Whether a token ends the hypothesis of this place, though it is no end token."""


class Search:
    """Hypotheses that go on, and the best that have ended, best first. `ends` are the tokens that end one."""

    def __init__(self, beams: Beams, most: int, ends: Collection[int]) -> None:
        self._beams = beams
        self._most = most
        self._ends = ends
        self._running = [Hypothesis((), 0.0)]
        self.finished: list[Hypothesis] = []
        self._hopeful = True
        self.done = False

    def step(self, scores: Tensor, describe: Describe, ends: Ends | None = None) -> list[tuple[int, int]]:
        """Continue by one token, given log-probabilities [hypotheses, vocabulary] of all that go on.

        Returns what goes on, the best first: the place that each hypothesis had, and its new token.
        """
        length = len(self._running[0].tokens) + 1
        found, ending = self._sorted(scores, length, ends)
        width = self._beams.width
        chosen = [item for item, ends in zip(found, ending, strict=True) if not ends][:width]
        grown = [Hypothesis((*self._running[p].tokens, describe(p, token)), score) for score, p, token in chosen]
        # Only what is among the best of all may end; the others are there to keep the search going.
        last = [item for item, ends in zip(found[:width], ending[:width], strict=True) if ends]
        self._finish(
            [
                Hypothesis(
                    (*self._running[p].tokens, describe(p, token)), score / float(length**self._beams.length_penalty)
                )
                for score, p, token in last
            ]
        )
        self._running = grown
        self._hopeful = self._hopeful and self._can_improve(length)
        self.done = not self._hopeful or not grown or (self._full and self._beams.stopping == "full")
        return [(parent, token) for _, parent, token in chosen]

    @property
    def _full(self) -> bool:
        return len(self.finished) == self._beams.width

    def _sorted(self, scores: Tensor, length: int, ends: Ends | None) -> tuple[list[Candidate], list[bool]]:
        """The best continuations until as many as the width go on, and which of them end."""
        width, full = self._beams.width, length >= self._most
        found: list[Candidate] = []
        ending: list[bool] = []
        for candidate in self._candidates(scores):
            _, place, token = candidate
            found.append(candidate)
            ending.append(full or token in self._ends or (ends is not None and ends(place, token)))
            if len(found) - sum(ending) == width or (full and len(found) == width):
                break
        return found, ending

    def _candidates(self, scores: Tensor) -> Iterator[Candidate]:
        """All continuations that are possible at all, the best first."""
        before = torch.tensor([h.score for h in self._running], dtype=torch.float64, device=scores.device)
        sums = (scores.double() + before[:, None]).flatten()
        vocabulary = scores.shape[-1]
        # Mostly so many are enough, whatever ends; a vocabulary is sorted only where they are not.
        values, places = sums.topk(min(len(sums), max(2, 1 + len(self._ends)) * self._beams.width))
        told = set()
        for value, at in zip(values.tolist(), places.tolist(), strict=True):
            if value == -torch.inf:
                return
            told.add(at)
            yield value, at // vocabulary, at % vocabulary
        values, places = sums.sort(descending=True, stable=True)
        for value, at in zip(values.tolist(), places.tolist(), strict=True):
            if value == -torch.inf:
                return
            if at not in told:
                yield value, at // vocabulary, at % vocabulary

    def _finish(self, ended: list[Hypothesis]) -> None:
        if self._full and self._beams.stopping == "full":
            return
        ranked = sorted([*self.finished, *ended], key=lambda hypothesis: -hypothesis.score)
        self.finished = ranked[: self._beams.width]

    def _can_improve(self, length: int) -> bool:
        """Whether the best that goes on could still displace one that has ended."""
        if not self._full or not self._running:
            return True
        penalty = self._beams.length_penalty
        reach = self._most if self._beams.stopping == "never" and penalty > 0 else length
        hoped = self._running[0].score / float(reach**penalty)
        return hoped > self.finished[-1].score
