"""Draws a token from one row of logits: the filters of a `Sampling`, then the inverse of what has summed up.

A row stays in the processor's cache from its maximum to its sums, so rows are taken one by one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attn_engine.sampling import Sampling

Floats = NDArray[Any]
CANDIDATES = (256, 4096)
"""Tokens that are looked at first where a filter needs the likeliest ones; all are sorted only if these fall short."""
BLOCK = 256
"""Weights that are summed at once."""
COLDEST = 1e-30
"""Below this temperature all weight is on the likeliest tokens; its inverse is still a float32."""


def first_largest(scores: Floats) -> int:
    """The first of the largest of scores [vocabulary]; -1 where it is not a finite number."""
    place = int(scores.argmax())
    return place if np.isfinite(scores[place]) else -1


def draw_token(scores: Floats, sampling: Sampling, point: float) -> int:
    """The token at `point`, in [0, 1), of the distribution that logits [vocabulary], float32, and the settings give.

    -1 where the logits are no distribution.
    """
    highest = scores.max()
    if not np.isfinite(highest):
        return -1
    if sampling.top_k or sampling.top_p < 1 or sampling.typical_p < 1:
        return _draw_ranked(scores, sampling, point)
    weights = _weights(scores, highest, sampling.temperature)
    if sampling.min_p:
        weights[weights < sampling.min_p] = 0
    return _pick_in_blocks(weights, point)


def _draw_ranked(scores: Floats, sampling: Sampling, point: float) -> int:
    """As `draw_token`, of the likeliest tokens that hold all that the filters keep."""
    total = None if sampling.top_k else float(_weights(scores, scores.max(), sampling.temperature).sum())
    ids, weights = np.arange(0), np.empty(0)
    for most in (*CANDIDATES, len(scores)):
        if most < len(scores) and (most < sampling.top_k or sampling.typical_p < 1):
            continue
        ids = _likeliest(scores, most)
        weights = _weights(scores[ids].astype(np.float64), scores[ids[0]], sampling.temperature)
        if sampling.top_k or most >= len(scores) or weights.sum() >= sampling.top_p * (total or 0.0):
            break
    kept = _typical(_filtered(weights, total, sampling), sampling.typical_p)
    return int(ids[_pick(kept, point)])


def _weights(scores: Floats, highest: Any, temperature: float) -> Floats:
    """exp((score - highest) / temperature)."""
    # Subtracting the highest first keeps tiny temperatures from overflowing; what is far below it becomes 0.
    with np.errstate(over="ignore"):
        weights = scores - highest
        weights *= 1 / max(temperature, COLDEST)
    found: Floats = np.exp(weights, out=weights)
    return found


def _likeliest(scores: Floats, most: int) -> NDArray[np.int64]:
    """The places of so many largest scores, and of those that equal the least of them, largest and first ones first."""
    ids = np.arange(len(scores))
    if most < len(scores):
        least = np.partition(scores, len(scores) - most)[len(scores) - most]
        ids = np.flatnonzero(scores >= least)
    return ids[np.argsort(-scores[ids], kind="stable")]


def _filtered(weights: Floats, total: float | None, sampling: Sampling) -> Floats:
    """Weights, likeliest first, with those that top_k, top_p and min_p drop set to 0; `total` is what all have."""
    if sampling.top_k:
        weights[sampling.top_k :] = 0
    # Shares are of what top_k has left; without it, of the whole vocabulary.
    share = weights.sum() if total is None else total
    before = weights.cumsum() - weights
    if sampling.top_p < 1:
        dropped = before >= sampling.top_p * share
        dropped[0] = False
        weights[dropped] = 0
    weights[weights < sampling.min_p * weights[0]] = 0
    return weights


def _typical(weights: Floats, mass: float) -> Floats:
    """Weights with those that typical_p drops set to 0; as likely ones stay or go together."""
    if mass == 1:
        return weights
    shares = weights / weights.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(shares)
        entropy = np.where(shares > 0, shares * surprise, 0).sum()
    distance = np.abs(surprise - entropy)
    order = np.argsort(distance, kind="stable")
    last = min(int((shares[order].cumsum() < mass).sum()), len(shares) - 1)
    return np.where(distance <= distance[order[last]], weights, 0)


def _pick(weights: Floats, point: float) -> int:
    """The first place whose cumulative share exceeds the point."""
    sums = weights.cumsum(dtype=np.float64)
    return _first_beyond(weights, sums, point * sums[-1])


def _pick_in_blocks(weights: Floats, point: float) -> int:
    """As `_pick`, of many float32: their block is found first."""
    blocks = np.add.reduceat(weights, _starts(len(weights)))
    sums = blocks.cumsum(dtype=np.float64)
    target = point * sums[-1]
    block = _first_beyond(blocks, sums, target)
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    left = target - (sums[block] - blocks[block])
    return block * BLOCK + _first_beyond(inside, inside.cumsum(dtype=np.float64), left)


def _first_beyond(weights: Floats, sums: Floats, target: float) -> int:
    place = int(np.searchsorted(sums, target, side="right"))
    # Rounding can put the target at the very end, behind the last that has weight.
    return place if place < len(sums) else int(np.flatnonzero(weights)[-1])


@cache
def _starts(size: int) -> NDArray[np.int64]:
    return np.arange(0, size, BLOCK)
