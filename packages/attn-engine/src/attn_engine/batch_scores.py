"""Penalties, biases and constraints of a whole batch, on the device that holds its logits.

The rules are those of `attn_engine.sampler.process_logits`, which processes one row. New tokens and parameters are
added to the `HostNumbers` of the step; the token tallies that penalties need stay on the device between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from attn_schema.sampling import ResolvedSamplingParams
from numpy.typing import NDArray
from torch import Tensor

from attn_engine.host_numbers import HostNumbers


@dataclass(eq=False)
class TokenTally:
    """A per-token statistic of a sequence on the device: `kept` [vocab_size] covers its first `noted` tokens."""

    noted: int = 0
    kept: Tensor | None = None


@dataclass(frozen=True, eq=False)
class BatchRow:
    """One row to choose a token for: its parameters, seed and position, and the known tokens of its sequence.

    With `greedy` the most likely token is taken, whatever came before. Where penalties need them, `seen` tallies
    which tokens have occurred, bool, and `counts` how often each was generated, float32. `suppressed` tokens, and those
    that are 0 in `grammar` [vocab_size], uint8, cannot be chosen. If the previous token is known only to the device,
    `after` is its index among the tokens that the previous step has chosen.
    """

    params: ResolvedSamplingParams
    seed: int
    position: int
    tokens: Sequence[int]
    greedy: bool = False
    seen: TokenTally | None = None
    counts: TokenTally | None = None
    suppressed: Collection[int] = ()
    grammar: NDArray[Any] | None = None
    after: int | None = None


def note_changes(numbers: HostNumbers, rows: Sequence[BatchRow], vocab_size: int) -> None:
    """Add the numbers that `process_together` needs from the host."""
    seen = {place: row.seen for place, row in enumerate(rows) if row.seen is not None}
    if seen:
        numbers.add("seen.rows", list(seen))
        numbers.add("seen.fresh", _untallied(rows, seen, vocab_size))
        _note_after(numbers, "seen", [rows[place] for place in seen], vocab_size)
        numbers.add("seen.penalty", [rows[place].params.repetition_penalty for place in seen], np.float64)
    counts = {place: row.counts for place, row in enumerate(rows) if row.counts is not None}
    if counts:
        params = [rows[place].params for place in counts]
        numbers.add("counts.rows", list(counts))
        numbers.add("counts.fresh", _untallied(rows, counts, vocab_size))
        _note_after(numbers, "counts", [rows[place] for place in counts], vocab_size)
        numbers.add("counts.frequency", [one.frequency_penalty for one in params], np.float64)
        numbers.add("counts.presence", [one.presence_penalty for one in params], np.float64)
    biased = {place: row.params.logit_bias for place, row in enumerate(rows) if row.params.logit_bias}
    if biased:
        numbers.add("bias.places", [place * vocab_size + token for place, bias in biased.items() for token in bias])
        numbers.add("bias.amounts", [amount for bias in biased.values() for amount in bias.values()], np.float64)
    suppressed = [n * vocab_size + token for n, row in enumerate(rows) for token in row.suppressed]
    if suppressed:
        numbers.add("suppressed", suppressed)
    grammars = {place: row.grammar for place, row in enumerate(rows) if row.grammar is not None}
    if grammars:
        numbers.add("grammar.rows", list(grammars))
        numbers.add("grammar.allowed", np.stack(list(grammars.values())), np.uint8)


def _untallied(rows: Sequence[BatchRow], tallies: Mapping[int, TokenTally], vocab_size: int) -> list[int]:
    """The flat indices, into tallies [tallies, vocab_size], of the tokens that these do not contain yet."""
    return [
        number * vocab_size + token
        for number, (place, tally) in enumerate(tallies.items())
        for token in rows[place].tokens[tally.noted :]
    ]


def _note_after(numbers: HostNumbers, name: str, rows: Sequence[BatchRow], vocab_size: int) -> None:
    """For rows whose newest token is known only to the device, add the flat offset of their tally and the index of that
    token (`BatchRow.after`)."""
    awaited = {number: row.after for number, row in enumerate(rows) if row.after is not None}
    if awaited:
        numbers.add(f"{name}.begins", [number * vocab_size for number in awaited])
        numbers.add(f"{name}.after", list(awaited.values()))


def process_together(
    logits: Tensor, rows: Sequence[BatchRow], sent: Mapping[str, Tensor], last: Tensor | None = None
) -> Tensor:
    """Logits [rows, vocab_size], float32, after penalties, logit_bias and constraints, in this order.

    `sent` holds what `note_changes` added; `last` [tokens], int64, are the tokens that the previous step has chosen,
    for rows with `after`. Updates the tallies of the rows to include all their tokens.
    """
    scores = logits.detach().float()
    if "seen.rows" in sent:
        scores = _repetition_penalized(scores, rows, sent, last)
    if "counts.rows" in sent:
        scores = _counts_penalized(scores, rows, sent, last)
    own = scores.dtype != logits.dtype or {"seen.rows", "counts.rows"} & sent.keys()
    if {"bias.places", "suppressed", "grammar.rows"} & sent.keys() and not own:
        scores = scores.clone(memory_format=torch.contiguous_format)
    scores = scores.contiguous()
    if "bias.places" in sent:
        scores.view(-1).index_add_(0, sent["bias.places"], sent["bias.amounts"].to(scores.dtype))
    if "suppressed" in sent:
        scores.view(-1).index_fill_(0, sent["suppressed"], -torch.inf)
    if "grammar.rows" in sent:
        at = sent["grammar.rows"]
        scores = _replaced(scores, at, _part(scores, at).masked_fill(sent["grammar.allowed"] == 0, -torch.inf))
    return scores


def _places(sent: Mapping[str, Tensor], name: str, last: Tensor | None) -> Tensor:
    """Like `_untallied`, on the device, with the tokens that only the device knows."""
    fresh = sent[f"{name}.fresh"]
    if last is None or f"{name}.after" not in sent:
        return fresh
    # A row without a token (-1) ends, so its tally does not matter.
    awaited = last.index_select(0, sent[f"{name}.after"]).clamp(min=0)
    return torch.cat([fresh, sent[f"{name}.begins"] + awaited])


def _tallied_lengths(rows: Sequence[BatchRow]) -> list[int]:
    """The number of tokens of each row that its tally covers after this step."""
    return [len(row.tokens) + (row.after is not None) for row in rows]


def _repetition_penalized(
    scores: Tensor, rows: Sequence[BatchRow], sent: Mapping[str, Tensor], last: Tensor | None
) -> Tensor:
    """Scores after the repetition penalty."""
    at, vocab_size = sent["seen.rows"], scores.shape[-1]
    tallies = [row.seen for row in rows if row.seen is not None]
    known = _stacked(tallies, torch.zeros(vocab_size, dtype=torch.bool, device=scores.device))
    known.view(-1).index_fill_(0, _places(sent, "seen", last), True)  # noqa: FBT003
    _keep(tallies, known, _tallied_lengths([row for row in rows if row.seen is not None]))
    penalty, part = sent["seen.penalty"].to(scores.dtype)[:, None], _part(scores, at)
    return _replaced(scores, at, torch.where(known, torch.where(part > 0, part / penalty, part * penalty), part))


def _counts_penalized(
    scores: Tensor, rows: Sequence[BatchRow], sent: Mapping[str, Tensor], last: Tensor | None
) -> Tensor:
    """Scores after frequency and presence penalties."""
    at, vocab_size, fresh = sent["counts.rows"], scores.shape[-1], _places(sent, "counts", last)
    tallies = [row.counts for row in rows if row.counts is not None]
    known = _stacked(tallies, torch.zeros(vocab_size, device=scores.device))
    known.view(-1).index_add_(0, fresh, torch.ones_like(fresh, dtype=known.dtype))
    _keep(tallies, known, _tallied_lengths([row for row in rows if row.counts is not None]))
    frequency, presence = (sent[f"counts.{name}"].to(scores.dtype)[:, None] for name in ("frequency", "presence"))
    return _replaced(scores, at, _part(scores, at) - (frequency * known + presence * (known > 0)))


def _stacked(tallies: Sequence[TokenTally], nothing: Tensor) -> Tensor:
    """The tallies, stacked [tallies, vocab_size]; `nothing` stands for a new one."""
    return torch.stack([nothing if tally.kept is None else tally.kept for tally in tallies])


def _keep(tallies: Sequence[TokenTally], known: Tensor, lengths: Sequence[int]) -> None:
    for tally, kept, length in zip(tallies, known.unbind(0), lengths, strict=True):
        tally.kept, tally.noted = kept, length


def _part(scores: Tensor, at: Tensor) -> Tensor:
    """The rows at the ascending indices `at`."""
    return scores if len(at) == len(scores) else scores[at]


def _replaced(scores: Tensor, at: Tensor, part: Tensor) -> Tensor:
    return part if len(at) == len(scores) else scores.index_copy(0, at, part)
