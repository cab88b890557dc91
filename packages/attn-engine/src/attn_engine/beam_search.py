"""Beam search: the search over log probabilities, and the sequences that hold the KV caches of its beams.

Graves 2012, "Sequence Transduction with Recurrent Neural Networks", arXiv 1211.3711, section 2.5; the length penalty is
that of Wu et al. 2016, arXiv 1609.08144, section 7, with the plain length in place of (5 + length) / 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from attn_schema import EarlyStopping, Token
from attn_schema.sampling import ResolvedSamplingParams
from torch import Tensor

from attn_engine.sampler import SamplingRow, log_probabilities, process_logits
from attn_engine.sequence import Sequence


@dataclass(frozen=True)
class BeamHypothesis:
    """The new tokens of a beam and their score: the sum of their log probabilities.

    The score of a finished hypothesis is divided by length ** length_penalty.
    """

    tokens: tuple[Token, ...]
    score: float


Candidate = tuple[float, int, int]
"""The score, beam and token id of a continuation."""
MakeToken = Callable[[int, int], Token]
"""Maps a beam and a token id to the token with its log probabilities."""
EndsBeam = Callable[[int, int], bool]
"""Maps a beam and a token id that is no end-of-sequence token to whether the token ends the beam."""


class BeamHypotheses:
    """The running beams and the best finished hypotheses, best first. `end_ids` are the end-of-sequence tokens."""

    def __init__(self, params: ResolvedSamplingParams, max_new_tokens: int, end_ids: Collection[int]) -> None:
        self._num_beams = params.num_beams
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_new_tokens = max_new_tokens
        self._end_ids = end_ids
        self._running = [BeamHypothesis((), 0.0)]
        self.finished: list[BeamHypothesis] = []
        self._improvable = True
        self.done = False

    def step(self, scores: Tensor, make_token: MakeToken, ends_beam: EndsBeam | None = None) -> list[tuple[int, int]]:
        """Continue by one token, given log probabilities [beams, vocab_size] of the running beams.

        Returns (index of the parent beam, new token) for each beam that continues, best first.
        """
        length = len(self._running[0].tokens) + 1
        found, ending = self._ranked(scores, length, ends_beam)
        width = self._num_beams
        chosen = [item for item, ends in zip(found, ending, strict=True) if not ends][:width]
        running = [
            BeamHypothesis((*self._running[beam].tokens, make_token(beam, token)), score)
            for score, beam, token in chosen
        ]
        # Only continuations among the best `num_beams` may finish; the others keep `num_beams` beams running.
        last = [item for item, ends in zip(found[:width], ending[:width], strict=True) if ends]
        divisor = float(length**self._length_penalty)
        self._finish(
            [
                BeamHypothesis((*self._running[beam].tokens, make_token(beam, token)), score / divisor)
                for score, beam, token in last
            ]
        )
        self._running = running
        self._improvable = self._improvable and self._can_improve(length)
        stop_early = self._full and self._early_stopping is EarlyStopping.TRUE
        self.done = not self._improvable or not running or stop_early
        return [(beam, token) for _, beam, token in chosen]

    @property
    def _full(self) -> bool:
        return len(self.finished) == self._num_beams

    def _ranked(self, scores: Tensor, length: int, ends_beam: EndsBeam | None) -> tuple[list[Candidate], list[bool]]:
        """The best continuations, until `num_beams` of them continue, and whether each one ends its beam."""
        width, at_limit = self._num_beams, length >= self._max_new_tokens
        found: list[Candidate] = []
        ending: list[bool] = []
        for candidate in self._candidates(scores):
            _, beam, token = candidate
            found.append(candidate)
            ending.append(at_limit or token in self._end_ids or (ends_beam is not None and ends_beam(beam, token)))
            if len(found) - sum(ending) == width or (at_limit and len(found) == width):
                break
        return found, ending

    def _candidates(self, scores: Tensor) -> Iterator[Candidate]:
        """All continuations of finite score, best first."""
        scores = scores.cpu() if scores.device.type == "mps" else scores  # which has no float64
        before = torch.tensor([h.score for h in self._running], dtype=torch.float64, device=scores.device)
        sums = (scores.double() + before[:, None]).flatten()
        vocab_size = scores.shape[-1]
        # This many usually suffice, whichever of them end; the whole vocabulary is sorted only if they do not.
        values, places = sums.topk(min(len(sums), max(2, 1 + len(self._end_ids)) * self._num_beams))
        given = set()
        for value, at in zip(values.tolist(), places.tolist(), strict=True):
            if value == -torch.inf:
                return
            given.add(at)
            yield value, at // vocab_size, at % vocab_size
        values, places = sums.sort(descending=True, stable=True)
        for value, at in zip(values.tolist(), places.tolist(), strict=True):
            if value == -torch.inf:
                return
            if at not in given:
                yield value, at // vocab_size, at % vocab_size

    def _finish(self, ended: list[BeamHypothesis]) -> None:
        if self._full and self._early_stopping is EarlyStopping.TRUE:
            return
        ranked = sorted([*self.finished, *ended], key=lambda hypothesis: -hypothesis.score)
        self.finished = ranked[: self._num_beams]

    def _can_improve(self, length: int) -> bool:
        """Whether the best running beam could still displace a finished hypothesis."""
        if not self._full or not self._running:
            return True
        at_maximum = self._early_stopping is EarlyStopping.NEVER and self._length_penalty > 0
        reach = self._max_new_tokens if at_maximum else length
        best = self._running[0].score / float(reach**self._length_penalty)
        return best > self.finished[-1].score


class ForksStates(Protocol):
    """The holder of the sequences' KV caches, which can free and fork them; implemented by `Scheduler`."""

    def remove(self, sequence: Sequence) -> None:
        """Free the KV cache of a sequence."""
        ...

    def branch(self, parent: Sequence, copy: Sequence) -> None:
        """Fork the KV cache of `parent` for `copy`, which has none."""
        ...


class BeamSearch:
    """One beam search. Each sequence in `running` holds one beam; they are scheduled together."""

    def __init__(self, params: ResolvedSamplingParams, sequences: list[Sequence], end_ids: Collection[int]) -> None:
        self.leader, *self._spare = sequences
        self.running = [self.leader]
        self._params = params
        self._end_ids = end_ids
        stops_at = {*params.stop_token_ids, *(() if params.ignore_eos else end_ids)}
        self._hypotheses = BeamHypotheses(params, self.leader.max_new_tokens, stops_at)
        for sequence in sequences:
            sequence.co_scheduled = self.running
            sequence.rank_with(self.leader)

    @property
    def ready(self) -> bool:
        """Whether the next logits of all beams have been computed."""
        return all(sequence.logits is not None for sequence in self.running)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the search, including those that hold no beam at present."""
        return [*self.running, *self._spare]

    def advance(self, forks: ForksStates) -> list[BeamHypothesis] | None:
        """Continue by one token; returns the best hypotheses once the search has ended, else None.

        Raises `FloatingPointError` if the model's logits are not finite, `UserError` if structured output cannot be
        matched any further.
        """
        rows = [sequence.logits for sequence in self.running if sequence.logits is not None]
        logits = torch.stack(rows).float()
        # One check for all rows, as every check waits for the device.
        if not bool(logits.amax(-1).isfinite().all()):
            raise FloatingPointError
        scores = torch.stack([self._scores(s, row) for s, row in zip(self.running, logits, strict=True)])
        ends_beam = None
        if self.leader.matcher is not None or self._params.stop:
            running = list(self.running)

            def ends_beam(beam: int, token: int) -> bool:
                return running[beam].would_end(token)

        chosen = self._hypotheses.step(scores, lambda beam, token: self._token(logits, beam, token), ends_beam)
        if self._hypotheses.done:
            return self._hypotheses.finished
        self._regroup(chosen, forks)
        return None

    def is_finite(self, sequence: Sequence) -> bool:
        """Whether the next logits of a beam have been computed and are finite."""
        return sequence.logits is not None and bool(sequence.logits.amax().isfinite())

    def _scores(self, sequence: Sequence, logits: Tensor) -> Tensor:
        vocab_size, device = len(logits), logits.device
        row = SamplingRow(
            self._params,
            0,
            len(sequence.tokens),
            token_counts=sequence.token_counts(),
            allowed=sequence.allowed(vocab_size, device, self._end_ids),
        )
        return process_logits(logits.log_softmax(-1), row)

    def _token(self, logits: Tensor, beam: int, token: int) -> Token:
        sequence = self.running[beam]
        if self._params.top_logprobs is None:
            return sequence.token(token)
        ((own, top),) = log_probabilities(logits[beam : beam + 1], [token], self._params.top_logprobs)
        return sequence.token(token, own, top)

    def _regroup(self, chosen: list[tuple[int, int]], forks: ForksStates) -> None:
        """Assign a sequence to each beam that continues: the sequence of its parent, or a fork of it."""
        parents = list(self.running)
        going_on = {beam for beam, _ in chosen}
        for beam, sequence in enumerate(parents):
            if beam not in going_on:
                forks.remove(sequence)
                self._spare.append(sequence)
        children: list[Sequence] = []
        copies: list[tuple[Sequence, Sequence]] = []
        for beam, _ in chosen:
            parent = parents[beam]
            if parent in children:
                copies.append((parent, self._spare.pop()))
                children.append(copies[-1][1])
            else:
                children.append(parent)
        self.running[:] = children
        for parent, copy in copies:
            copy.become(parent)
            forks.branch(parent, copy)
        for sequence, (_, token) in zip(children, chosen, strict=True):
            sequence.append_beam_token(token)
