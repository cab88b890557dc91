"""Chooses the next token of every sequence of a batch from its logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_engine.adjust import Draw, adjust
from attn_engine.chance import uniform
from attn_engine.sampling import Sampling

CANDIDATES = 256
"""Tokens that are looked at first where a filter needs the likeliest ones; all are sorted only if these fall short."""

BLOCK = 256
"""Logits whose maximum is taken at once when the likeliest token is looked for."""


def choose_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Token ids, one a row of logits [rows, vocabulary]; -1 where the logits of a row are not numbers.

    A row's choice depends on that row alone.
    """
    if all(draw.sampling.greedy for draw in draws):
        return likeliest(logits)
    chosen = [0] * len(draws)
    greedy = [row for row, draw in enumerate(draws) if draw.sampling.greedy]
    for row, token in zip(greedy, likeliest(logits[greedy]) if greedy else [], strict=True):
        chosen[row] = token
    # Rows with the same settings are computed together; each row's result is the same as alone.
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for row, draw in enumerate(draws):
        if not draw.sampling.greedy:
            kinds.setdefault((draw.sampling.temperature == 0, _ranked(draw.sampling)), []).append(row)
    for (cold, ranked), rows in kinds.items():
        adjusted = torch.stack([adjust(logits[row], draws[row]) for row in rows])
        tokens = likeliest(adjusted) if cold else _sample(adjusted, [draws[row] for row in rows], ranked=ranked)
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] = token
    return chosen


def log_probabilities(logits: Tensor, tokens: Sequence[int], most: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each row of logits [rows, vocabulary], the log-probability of its token and the `most` likeliest."""
    scores = logits.float().log_softmax(-1)
    own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    values, ids = scores.topk(min(most, scores.shape[-1]), dim=-1)
    pairs = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return list(zip(own, pairs, strict=True))


def _ranked(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.typical_p < 1


def likeliest(logits: Tensor) -> list[int]:
    """The first of the likeliest tokens of each row; -1 where it is not a finite number.

    The maximum of each block, then the place in the best block: on a CPU, torch finds a maximum ten times faster than
    its place.
    """
    missing = -logits.shape[-1] % BLOCK
    # Padding copies all logits, even with nothing.
    padded = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()
    blocks = padded.view(len(logits), -1, BLOCK)
    best = blocks.amax(-1).argmax(-1)
    values, places = blocks[torch.arange(len(logits), device=logits.device), best].max(-1)
    found: list[int] = (best * BLOCK + places).where(values.isfinite(), -1).tolist()
    return found


def _sample(logits: Tensor, draws: Sequence[Draw], *, ranked: bool) -> list[int]:
    """Inverse of the cumulative distribution, at one random number a row."""
    settings = [draw.sampling for draw in draws]
    highest = logits.amax(-1, keepdim=True)
    broken = ~highest[:, 0].isfinite()
    # Subtracting the highest first keeps tiny temperatures from overflowing.
    distance = (logits - highest).double()
    weights = (distance / _column([s.temperature for s in settings], distance)).exp()
    weights = weights.where(weights >= _column([s.min_p for s in settings], weights), 0) if not ranked else weights
    points = torch.tensor([uniform(draw.seed, draw.position) for draw in draws], dtype=torch.float64)
    points = points.to(logits.device)
    tokens = _pick_ranked(weights, settings, points) if ranked else _pick(weights, points)
    found: list[int] = tokens.where(~broken, -1).tolist()
    return found


def _pick(weights: Tensor, points: Tensor) -> Tensor:
    """The first column whose cumulative share exceeds the row's point; weights [rows, columns], points [rows]."""
    sums = weights.cumsum(-1)
    target = points[:, None] * sums[:, -1:]
    columns = torch.searchsorted(sums, target, right=True)[:, 0]
    # Rounding can put the target at the very end, behind the last column that has weight.
    last = (weights > 0).long().mul(torch.arange(weights.shape[-1], device=weights.device)).amax(-1)
    return torch.minimum(columns, last)


def _pick_ranked(weights: Tensor, settings: Sequence[Sampling], points: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    short = min(CANDIDATES, weights.shape[-1])
    values, ids = weights.topk(short, dim=-1)
    enough = torch.tensor([0 < s.top_k <= short for s in settings], device=weights.device)
    enough |= values.sum(-1) >= torch.tensor([s.top_p for s in settings], device=weights.device) * total[:, 0]
    enough &= torch.tensor([s.typical_p == 1 for s in settings], device=weights.device)
    tokens = ids.gather(1, _pick(_filter(values, total, settings), points)[:, None])[:, 0]
    if not bool(enough.all()):
        rows = (~enough).nonzero()[:, 0]
        chosen = [settings[row] for row in rows.tolist()]
        values, ids = weights[rows].sort(stable=True, dim=-1, descending=True)
        kept = _typical(_filter(values, total[rows], chosen), chosen)
        tokens[rows] = ids.gather(1, _pick(kept, points[rows])[:, None])[:, 0]
    return tokens


def _filter(values: Tensor, total: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Weights [rows, candidates], likeliest first, with those that top_k, top_p and min_p drop set to 0."""
    rank = torch.arange(values.shape[-1], device=values.device)
    most = torch.tensor([s.top_k or values.shape[-1] for s in settings], device=values.device)[:, None]
    values = values.where(rank < most, 0)
    # Shares are of what top_k has left; without it, of the whole vocabulary.
    limited = torch.tensor([s.top_k > 0 for s in settings], device=values.device)[:, None]
    share = torch.where(limited, values.sum(-1, keepdim=True), total)
    before = values.cumsum(-1) - values
    values = values.where((before < _column([s.top_p for s in settings], values) * share) | (rank == 0), 0)
    return values.where(values >= _column([s.min_p for s in settings], values) * values[:, :1], 0)


def _typical(values: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Weights [rows, candidates] with those that typical_p drops set to 0; as likely ones stay or go together."""
    if all(s.typical_p == 1 for s in settings):
        return values
    shares = values / values.sum(-1, keepdim=True)
    surprise = -shares.log()
    distance = (surprise - torch.special.entr(shares).sum(-1, keepdim=True)).abs()
    nearest, order = distance.sort(stable=True, dim=-1)
    mass = _column([s.typical_p for s in settings], values)
    last = (shares.gather(1, order).cumsum(-1) < mass).sum(-1, keepdim=True).clamp_(max=values.shape[-1] - 1)
    return values.where((distance <= nearest.gather(1, last)) | (mass == 1), 0)


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]
