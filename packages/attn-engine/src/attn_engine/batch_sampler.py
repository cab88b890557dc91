"""Samples the next tokens of a whole batch on the device that holds its logits, with one copy to it and one back.

The rules are those of `attn_engine.sampler`, which processes one row after the other on a CPU; here, too, the choice
for a row depends on that row alone. Where filters need ranked tokens, only the most likely ones are ranked first; a row
for which these do not suffice is sampled again over the whole vocabulary, for which the host waits once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from attn_schema.sampling import ResolvedSamplingParams
from torch import Tensor

from attn_engine.batch_scores import BatchRow, note_changes, process_together
from attn_engine.host_numbers import HostNumbers, fetched
from attn_engine.sampler import MIN_TEMPERATURE, Choice, likeliest, uniform

CANDIDATES = 1024
"""The number of most likely tokens that are ranked first."""
UNKNOWN = -2
"""The token value that marks a row which needs more candidates."""


class RowParameters(NamedTuple):
    """The sampling parameters of rows, [rows] float64 each: `inverse` is 1 / temperature, `points` are uniform random
    numbers in [0, 1), and the others are fields of `SamplingParams`."""

    inverse: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor
    points: Tensor


TokenChooser = Callable[[Tensor, RowParameters, int], Tensor]
"""Chooses tokens [rows] for scores [rows, vocab_size] among the given number of candidates."""


@dataclass(eq=False)
class SampledTokens:
    """The tokens chosen for a batch of rows, on the device, with the requested log probabilities.

    `parts` are tensors [n]: first the tokens [rows], int64, then log probabilities (see `_log_probabilities`) of the
    rows in `logprob_counts`, which maps a row to its number of top log probabilities. `logits`, `scores` and `rows` are
    kept if the candidates may not suffice for some rows; which rows these are (`short`) is known once `parts` have been
    read.
    """

    parts: list[Tensor]
    logprob_counts: Mapping[int, int] = field(default_factory=dict)
    logits: Tensor | None = None
    scores: Tensor | None = None
    rows: Sequence[BatchRow] = ()
    short: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> Tensor:
        """The tokens [rows]; -1 where the scores are not finite, `UNKNOWN` where more candidates are needed."""
        return self.parts[0]

    def choices(self, read: Sequence[list[Any]]) -> list[Choice]:
        """The choice for each row, from the values of `parts` that the host has `read`.

        The token is -1 where the scores of a row are not finite. Rows that are `short` are sampled again, for which the
        host waits once more.
        """
        tokens, *found = read
        self.short = [place for place, token in enumerate(tokens) if token == UNKNOWN]
        again = self._resample() if self.short else []
        for place, (token, own) in zip(self.short, again, strict=True):
            tokens[place] = token
            if place in self.logprob_counts:
                found[0][list(self.logprob_counts).index(place)] = own
        return _choices(tokens, self.logprob_counts, found)

    def _resample(self) -> list[tuple[int, float]]:
        """Sample the rows that are short over the whole vocabulary; returns their tokens and log probabilities."""
        scores, logits = cast("Tensor", self.scores), cast("Tensor", self.logits)
        numbers = HostNumbers()
        numbers.add("rows", self.short)
        numbers.add("parameters", _parameter_columns([self.rows[place] for place in self.short]), np.float64)
        sent = numbers.send(scores.device)
        at = sent["rows"]
        tokens = ranked(scores[at], RowParameters(*sent["parameters"].unbind(0)), scores.shape[-1])
        chosen, own = fetched([tokens, _log_probabilities(logits[at], tokens, 0)[0]])
        return [(int(token), logprob) for token, logprob in zip(chosen, own, strict=True)]


def choose_together(
    logits: Tensor, rows: Sequence[BatchRow], beside: Tensor | None = None
) -> tuple[list[Choice], list[int]]:
    """The choice for each row of logits [rows, vocab_size]; the token is -1 where the scores are not finite.

    `beside` are other integers [n] on the device, which are fetched by the same copy and returned too.
    """
    sampled = draw(logits, rows)
    read = fetched(sampled.parts if beside is None else [*sampled.parts, beside])
    others = [] if beside is None else [int(number) for number in read.pop()]
    return sampled.choices(read), others


def draw(logits: Tensor, rows: Sequence[BatchRow], last: Tensor | None = None) -> SampledTokens:
    """Choose a token for each row of logits [rows, vocab_size] without waiting for the device; `last` as in
    `process_together`."""
    logits = logits.detach()
    numbers, samples = HostNumbers(), not all(row.greedy for row in rows)
    if samples:
        _add_numbers(numbers, rows, logits.shape[-1])
    counts = {place: row.params.top_logprobs for place, row in enumerate(rows)}
    logprob_counts = {place: count for place, count in counts.items() if count is not None}
    if logprob_counts:
        numbers.add("logprob_rows", list(logprob_counts))
    sent = numbers.send(logits.device)
    scores = process_together(logits, rows, sent, last) if samples else logits
    parts = [_chosen(scores, rows, sent) if samples else likeliest(logits)]
    if logprob_counts:
        at = sent["logprob_rows"]
        parts += _log_probabilities(logits[at], parts[0][at], max(logprob_counts.values()))
    if any(may_fall_short(row.params) for row in rows):
        return SampledTokens(parts, logprob_counts, logits, scores, rows)
    return SampledTokens(parts, logprob_counts)


def may_fall_short(params: ResolvedSamplingParams) -> bool:
    """Whether the `CANDIDATES` most likely tokens may not suffice, so that a row may have to be sampled again."""
    return chooser_of(params) is ranked and not 0 < params.top_k <= CANDIDATES


def _chosen(scores: Tensor, rows: Sequence[BatchRow], sent: Mapping[str, Tensor]) -> Tensor:
    """The tokens [rows] chosen for scores [rows, vocab_size]; -1 where these are not finite, `UNKNOWN` where more
    candidates are needed."""
    highest, chosen = scores.max(-1)
    for chooser in _rows_by_chooser(rows):
        at = sent[chooser.__name__]
        parameters = RowParameters(*sent[f"{chooser.__name__}.parameters"].unbind(0))
        if len(at) == len(rows):
            chosen = chooser(scores, parameters, CANDIDATES)
        else:
            chosen = chosen.index_copy(0, at, chooser(scores[at], parameters, CANDIDATES))
    return chosen.where(highest.isfinite(), -1)


def _log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> list[Tensor]:
    """The log probabilities of tokens [rows] given logits [rows, vocab_size], then those of the `count` most likely
    tokens [rows * count], and their ids [rows * count]."""
    scores = logits.float().log_softmax(-1)
    own = scores.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    values, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return [own, values.flatten(), ids.flatten()]


def _choices(
    tokens: Sequence[float], logprob_counts: Mapping[int, int], found: Sequence[Sequence[float]]
) -> list[Choice]:
    """The choice for each row, with log probabilities for the rows in `logprob_counts`, which says how many of each."""
    choices: list[Choice] = [(int(token), None, ()) for token in tokens]
    if logprob_counts:
        own, values, ids = found
        width = len(values) // len(logprob_counts)
        for number, (place, count) in enumerate(logprob_counts.items()):
            start, stop = number * width, number * width + min(count, width)
            top = [(int(id_), value) for id_, value in zip(ids[start:stop], values[start:stop], strict=True)]
            if tokens[place] >= 0:
                choices[place] = (int(tokens[place]), own[number], top)
    return choices


def chooser_of(params: ResolvedSamplingParams) -> TokenChooser:
    """The function that chooses tokens under these parameters."""
    if params.temperature == 0:
        return greedy
    if params.typical_p < 1:
        return typical
    return ranked if params.top_k or params.top_p < 1 else weighted


def _rows_by_chooser(rows: Sequence[BatchRow]) -> dict[TokenChooser, list[int]]:
    """The rows of each `TokenChooser`, except those that take the most likely token."""
    found: dict[TokenChooser, list[int]] = {}
    for place, row in enumerate(rows):
        found.setdefault(chooser_of(row.params), []).append(place)
    found.pop(greedy, None)
    return found


def _add_numbers(numbers: HostNumbers, rows: Sequence[BatchRow], vocab_size: int) -> None:
    """Add the numbers that `process_together` and `_chosen` need from the host."""
    note_changes(numbers, rows, vocab_size)
    for chooser, places in _rows_by_chooser(rows).items():
        numbers.add(chooser.__name__, places)
        parameters = _parameter_columns([rows[place] for place in places])
        numbers.add(f"{chooser.__name__}.parameters", parameters, np.float64)


def _parameter_columns(rows: Sequence[BatchRow]) -> list[tuple[float, ...]]:
    """The parameters of the rows, one tuple for each field of `RowParameters`."""
    lines = [
        (
            1 / max(row.params.temperature, MIN_TEMPERATURE),
            row.params.top_k,
            row.params.top_p,
            row.params.min_p,
            row.params.typical_p,
            uniform(row.seed, row.position),
        )
        for row in rows
    ]
    return list(zip(*lines, strict=True))


def greedy(scores: Tensor, parameters: RowParameters, candidates: int) -> Tensor:
    """The most likely tokens [rows] of scores [rows, vocab_size]."""
    del parameters, candidates
    return scores.argmax(-1)


def weighted(scores: Tensor, parameters: RowParameters, candidates: int) -> Tensor:
    """Sample tokens [rows] from scores [rows, vocab_size]: inverse transform sampling at `points`, with min_p."""
    del candidates
    weights = weights_of(scores, scores.amax(-1, keepdim=True), parameters)
    weights = weights.masked_fill(weights < parameters.min_p[:, None], 0)
    return pick(weights, parameters)


def ranked(scores: Tensor, parameters: RowParameters, candidates: int) -> Tensor:
    """Like `weighted`, among the tokens that all filters keep; `UNKNOWN` where some of these are not candidates."""
    everything = weights_of(scores, scores.amax(-1, keepdim=True), parameters).sum(-1)
    best, ids = most_likely(scores, candidates)
    best = best.double()
    weights = weights_of(best, best[:, :1], parameters)
    known = weights.sum(-1)
    among = torch.arange(weights.shape[1], device=weights.device)
    limited = parameters.top_k > 0
    weights = weights.masked_fill(limited[:, None] & (among >= parameters.top_k[:, None]), 0)
    mass = torch.where(limited, weights.sum(-1), everything.double())
    enough = torch.where(limited, parameters.top_k <= weights.shape[1], known >= parameters.top_p * mass)
    enough |= weights.shape[1] == scores.shape[-1]
    before = weights.cumsum(-1) - weights
    dropped = (parameters.top_p < 1)[:, None] & (before >= (parameters.top_p * mass)[:, None]) & (among > 0)
    weights = weights.masked_fill(dropped, 0)
    weights = weights.masked_fill(weights < parameters.min_p[:, None] * weights[:, :1], 0)
    weights = keep_typical(weights, parameters)
    return ids.gather(1, pick(weights, parameters)[:, None])[:, 0].where(enough, UNKNOWN)


def typical(scores: Tensor, parameters: RowParameters, candidates: int) -> Tensor:
    """Like `ranked`, over the whole vocabulary, as typical_p may keep any token."""
    del candidates
    return ranked(scores, parameters, scores.shape[-1])


def weights_of(scores: Tensor, highest: Tensor, parameters: RowParameters) -> Tensor:
    """The weights exp((score - highest) / temperature) of scores [rows, tokens]."""
    return ((scores - highest) * parameters.inverse[:, None].to(scores.dtype)).exp()


def most_likely(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row and their token ids, largest first; equal scores in order of token id."""
    if count >= scores.shape[-1]:
        return scores.sort(dim=-1, descending=True, stable=True)
    best, ids = scores.topk(count, -1, sorted=False)
    ids, order = ids.sort(-1)
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(1, order)


def keep_typical(weights: Tensor, parameters: RowParameters) -> Tensor:
    """Set the weights that typical_p drops to 0; equally likely tokens are kept or dropped together."""
    if weights.shape[-1] == 0:
        return weights
    probabilities = weights / weights.sum(-1, keepdim=True)
    surprise = -probabilities.log()
    entropy = torch.where(probabilities > 0, probabilities * surprise, 0).sum(-1, keepdim=True)
    distance = (surprise - entropy).abs()
    ordered, order = distance.sort(dim=-1, stable=True)
    mass = probabilities.gather(1, order).cumsum(-1)
    last = (mass < parameters.typical_p[:, None]).sum(-1, keepdim=True).clamp(max=weights.shape[1] - 1)
    dropped = (distance > ordered.gather(1, last)) & (parameters.typical_p < 1)[:, None]
    return weights.masked_fill(dropped, 0)


def pick(weights: Tensor, parameters: RowParameters) -> Tensor:
    """The first index [rows] at which the cumulative sum of weights [rows, tokens] exceeds point * total."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    target = parameters.points[:, None] * sums[:, -1:]
    place = torch.searchsorted(sums, target, right=True)[:, 0]
    # Rounding can put the target at the very end, after the last token with a positive weight.
    among = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, among, 0).amax(-1)
    return torch.minimum(place, last)
