"""Chooses the next tokens of a whole batch on the device that has its logits, with one copy back.

The same rules as `attn_engine.sampler`, which takes one row after the other on a CPU; a row's choice depends on that
row alone here too. Where filters need tokens ranked, the most likely ones are looked at first; a row for which these do
not suffice is done again over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from attn_schema import SamplingParams
from torch import Tensor

from attn_engine.sampler import MIN_TEMPERATURE, SamplingRow, uniform

CANDIDATES = 1024
"""Most likely tokens that are ranked first."""
UNKNOWN = -2
"""Stands for a row that needs more candidates."""


class Numbers(NamedTuple):
    """The parameters of rows, [rows] float64 each: the inverse temperature, and those of `SamplingParams`; `points` are
    the random numbers."""

    inverse: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    typical_p: Tensor
    points: Tensor


Kind = Callable[[Tensor, Numbers, int], Tensor]
"""Chooses tokens [rows] of scores [rows, vocab_size] among so many candidates."""


def choose_together(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Token ids, one a row of logits [rows, vocab_size]; -1 where the logits of a row are not finite."""
    scores = process_together(logits, rows)
    kinds = [kind_of(row.params) for row in rows]
    highest, best = scores.max(-1)
    if set(kinds) == {greedy}:
        chosen = best
    else:
        numbers = numbers_of(rows, scores.device)
        chosen = best.clone() if greedy in kinds else best
        for kind in {kind for kind in kinds if kind is not greedy}:
            places = [place for place, found in enumerate(kinds) if found is kind]
            if len(places) == len(rows):
                chosen = kind(scores, numbers, CANDIDATES)
                continue
            at = torch.tensor(places, device=scores.device)
            part = Numbers(*(number[at] for number in numbers))
            chosen = chosen.index_copy(0, at, kind(scores[at], part, CANDIDATES))
    found: list[int] = chosen.where(highest.isfinite(), -1).tolist()
    short = [place for place, token in enumerate(found) if token == UNKNOWN]
    if short:
        at = torch.tensor(short, device=scores.device)
        numbers = numbers_of([rows[place] for place in short], scores.device)
        for place, token in zip(short, ranked(scores[at], numbers, scores.shape[-1]).tolist(), strict=True):
            found[place] = token
    return found


def kind_of(params: SamplingParams) -> Kind:
    """The function that chooses with these parameters."""
    if params.temperature == 0:
        return greedy
    if params.typical_p < 1:
        return typical
    return ranked if params.top_k or params.top_p < 1 else weighted


def numbers_of(rows: Sequence[SamplingRow], device: torch.device) -> Numbers:
    """The parameters of rows, by one copy."""
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
    return Numbers(*torch.tensor(lines, dtype=torch.float64).to(device, non_blocking=True).unbind(1))


def process_together(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits [rows, vocab_size], float32, after penalties, logit_bias and constraints, in this order."""
    scores = logits.detach().float()
    if all(row.unchanged for row in rows):
        return scores
    scores = scores.clone() if scores is logits or logits.dtype == torch.float32 else scores
    seen = {place: row.seen for place, row in enumerate(rows) if row.seen is not None}
    if seen:
        at, known = indices(seen, scores), torch.stack(list(seen.values()))
        penalty = values([rows[place].params.repetition_penalty for place in seen], scores)
        part = scores[at]
        scores[at] = torch.where(known, torch.where(part > 0, part / penalty, part * penalty), part)
    counts = {place: row.counts for place, row in enumerate(rows) if row.counts is not None}
    if counts:
        at, known = indices(counts, scores), torch.stack(list(counts.values()))
        frequency = values([rows[place].params.frequency_penalty for place in counts], scores)
        presence = values([rows[place].params.presence_penalty for place in counts], scores)
        scores[at] -= frequency * known + presence * (known > 0)
    biases = [(n, id_, value) for n, row in enumerate(rows) for id_, value in (row.params.logit_bias or {}).items()]
    if biases:
        lines, ids, added = zip(*biases, strict=True)
        places = torch.tensor([lines, ids], device=scores.device)
        amounts = torch.tensor(added, dtype=scores.dtype, device=scores.device)
        scores.index_put_((places[0], places[1]), amounts, accumulate=True)
    allowed = {place: row.allowed for place, row in enumerate(rows) if row.allowed is not None}
    if allowed:
        at = indices(allowed, scores)
        scores[at] = scores[at].masked_fill(~torch.stack(list(allowed.values())), -torch.inf)
    return scores


def indices(places: dict[int, Tensor], like: Tensor) -> Tensor:
    """These rows, on the device of a tensor."""
    return torch.tensor(list(places), device=like.device)


def values(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers [rows, 1] of the type of a tensor."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]


def greedy(scores: Tensor, numbers: Numbers, candidates: int) -> Tensor:
    """The most likely tokens [rows] of scores [rows, vocab_size]."""
    del numbers, candidates
    return scores.argmax(-1)


def weighted(scores: Tensor, numbers: Numbers, candidates: int) -> Tensor:
    """Tokens [rows] at the points of the cumulative distributions of scores [rows, vocab_size]."""
    del candidates
    weights = weights_of(scores, scores.amax(-1, keepdim=True), numbers)
    weights = weights.masked_fill(weights < numbers.min_p[:, None], 0)
    return pick(weights, numbers)


def ranked(scores: Tensor, numbers: Numbers, candidates: int) -> Tensor:
    """As `weighted`, of the tokens that the filters keep; `UNKNOWN` where some of these are no candidates."""
    everything = weights_of(scores, scores.amax(-1, keepdim=True), numbers).sum(-1)
    best, ids = most_likely(scores, candidates)
    best = best.double()
    weights = weights_of(best, best[:, :1], numbers)
    known = weights.sum(-1)
    among = torch.arange(weights.shape[1], device=weights.device)
    limited = numbers.top_k > 0
    weights = weights.masked_fill(limited[:, None] & (among >= numbers.top_k[:, None]), 0)
    mass = torch.where(limited, weights.sum(-1), everything.double())
    enough = torch.where(limited, numbers.top_k <= weights.shape[1], known >= numbers.top_p * mass)
    enough |= weights.shape[1] == scores.shape[-1]
    before = weights.cumsum(-1) - weights
    dropped = (numbers.top_p < 1)[:, None] & (before >= (numbers.top_p * mass)[:, None]) & (among > 0)
    weights = weights.masked_fill(dropped, 0)
    weights = weights.masked_fill(weights < numbers.min_p[:, None] * weights[:, :1], 0)
    weights = keep_typical(weights, numbers)
    return ids.gather(1, pick(weights, numbers)[:, None])[:, 0].where(enough, UNKNOWN)


def typical(scores: Tensor, numbers: Numbers, candidates: int) -> Tensor:
    """As `ranked`, with typical_p, for which any token may count."""
    del candidates
    return ranked(scores, numbers, scores.shape[-1])


def weights_of(scores: Tensor, highest: Tensor, numbers: Numbers) -> Tensor:
    """exp((score - highest) / temperature) of scores [rows, tokens]."""
    return ((scores - highest) * numbers.inverse[:, None].to(scores.dtype)).exp()


def most_likely(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row with their tokens, largest first; of equal ones, the first token first."""
    if count >= scores.shape[-1]:
        return scores.sort(dim=-1, descending=True, stable=True)
    best, ids = scores.topk(count, -1, sorted=False)
    ids, order = ids.sort(-1)
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return best, ids.gather(1, order)


def keep_typical(weights: Tensor, numbers: Numbers) -> Tensor:
    """Weights with those that typical_p drops set to 0; equally likely tokens are kept or dropped together."""
    if weights.shape[-1] == 0:
        return weights
    probabilities = weights / weights.sum(-1, keepdim=True)
    surprise = -probabilities.log()
    entropy = torch.where(probabilities > 0, probabilities * surprise, 0).sum(-1, keepdim=True)
    distance = (surprise - entropy).abs()
    ordered, order = distance.sort(dim=-1, stable=True)
    mass = probabilities.gather(1, order).cumsum(-1)
    last = (mass < numbers.typical_p[:, None]).sum(-1, keepdim=True).clamp(max=weights.shape[1] - 1)
    dropped = (distance > ordered.gather(1, last)) & (numbers.typical_p < 1)[:, None]
    return weights.masked_fill(dropped, 0)


def pick(weights: Tensor, numbers: Numbers) -> Tensor:
    """The first index [rows] whose cumulative weight exceeds the row's point of all; weights [rows, tokens]."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    target = numbers.points[:, None] * sums[:, -1:]
    place = torch.searchsorted(sums, target, right=True)[:, 0]
    # Rounding can put the target at the very end, behind the last that has weight.
    among = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, among, 0).amax(-1)
    return torch.minimum(place, last)
