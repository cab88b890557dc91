"""Samples the next tokens of a whole batch on the device that holds its logits, with one copy to it and one back.

The rules are those of `attn_engine.sampler`, which processes one row after the other on a CPU; here, too, the choice
for a row depends on that row alone. A row for which the most likely tokens do not suffice is sampled again over the
whole vocabulary, for which the host waits once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from attn_schema.sampling import ResolvedSamplingParams
from torch import Tensor

from attn_engine.batch_scores import BatchRow, note_changes, process_together
from attn_engine.host_numbers import HostNumbers, fetched
from attn_engine.sampler import (
    CANDIDATES,
    UNKNOWN,
    Choice,
    RowParameters,
    TokenChooser,
    chooser_of,
    greedy,
    likeliest,
    parameters_of,
    ranked,
    uniform,
)


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
    lines = [parameters_of(row.params, uniform(row.seed, row.position)) for row in rows]
    return list(zip(*lines, strict=True))
