"""The definition of sampling in NumPy, bit for bit what `attn_core.kernels.sampling` says in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from attn_engine.sampler import MIN_TEMPERATURE, SamplingRow, process_logits, uniform
from attn_schema.sampling import ResolvedSamplingParams
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[Any]
BLOCK = 256
"""The number of weights that are summed together."""
CANDIDATES = (256, 4096)
"""The numbers of most likely tokens that are ranked first; all tokens are ranked only if these do not suffice."""
WEIGHT_BITS = 32
ONE_WEIGHT = 2.0**WEIGHT_BITS
"""The weight of the most likely token."""
LEAST_EXPONENT = np.float32(-30)
"""Exponents are clamped to this value, at which the weight rounds to 0."""
LOG2_E, LN2_UPPER, LN2_LOWER = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
EXPONENTIAL = np.array(
    [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1],
    dtype=np.float32,
)
"""Coefficients of (e^x - 1 - x) / x², the highest first (Moshier's Cephes library, expf)."""


def defined_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """The token of each row of logits [rows, vocab_size]; -1 where the logits of a row are not finite."""
    found = []
    for line, row in zip(logits.unbind(0), rows, strict=True):
        scores = process_logits(line, row).numpy()
        chance = uniform(row.seed, row.position)
        found.append(sample_token(scores, row.params, chance) if row.params.temperature else argmax(scores))
    return found


def argmax(scores: Floats) -> int:
    """The index of the largest of scores [vocab_size], the first of equal ones; -1 if it is not finite."""
    place = int(scores.argmax())
    return place if np.isfinite(scores[place]) else -1


def sample_token(scores: Floats, params: ResolvedSamplingParams, point: float) -> int:
    """The token at `point`, in [0, 1), of the cumulative distribution of logits [vocab_size], float32.

    Returns -1 if the logits are not finite.
    """
    highest = scores.max()
    if not np.isfinite(highest):
        return -1
    if params.top_k or params.top_p < 1:
        return _sample_ranked(scores, params, point)
    weights = _weights(scores, highest, params.temperature)
    weights[weights < _least(params)] = 0
    return _pick_in_blocks(weights, point)


def _sample_ranked(scores: Floats, params: ResolvedSamplingParams, point: float) -> int:
    """Like `sample_token`, with filters that need ranked tokens: ranks enough of the most likely tokens to include all
    that the filters keep."""
    total = None if params.top_k else _sum(_weights(scores, scores.max(), params.temperature))
    ids, weights = np.arange(0), np.empty(0)
    for count in (*CANDIDATES, len(scores)):
        if count < len(scores) and count < params.top_k:
            continue
        ids = _most_likely(scores, count)
        weights = _weights(scores[ids], scores[ids[0]], params.temperature)
        if params.top_k or count >= len(scores) or _sum(weights) >= params.top_p * (total or 0.0):
            break
    return int(ids[_pick(_filter(weights, total, params), point)])


def _weights(scores: Floats, highest: Any, temperature: float) -> Floats:
    """The weights round(2^32 · e^((score - highest) / temperature)), float32; kernels compute them bit for bit."""
    # Subtracting the highest score first prevents overflow at tiny temperatures; scores far below it get weight 0.
    with np.errstate(over="ignore"):
        x = (scores - highest) * np.float32(1 / max(temperature, MIN_TEMPERATURE))
    np.maximum(x, LEAST_EXPONENT, out=x)
    power = np.rint(x * LOG2_E)
    x -= power * LN2_UPPER
    x -= power * LN2_LOWER
    found: Floats = np.full_like(x, EXPONENTIAL[0])
    for coefficient in EXPONENTIAL[1:]:
        found *= x
        found += coefficient
    found *= x * x
    x += np.float32(1)
    found += x
    # The bits of a float32 that is a power of two are its biased exponent alone.
    bits = power.astype(np.int32)
    bits += 127 + WEIGHT_BITS
    bits <<= 23
    found *= bits.view(np.float32)
    return np.rint(found, out=found)


def _least(params: ResolvedSamplingParams) -> Any:
    """The smallest weight that min_p keeps."""
    return np.float32(params.min_p * ONE_WEIGHT)


def _sum(weights: Floats) -> float:
    """The exact sum of integer weights, which float64 does not round."""
    return float(weights.sum(dtype=np.float64))


def _most_likely(scores: Floats, count: int) -> NDArray[np.int64]:
    """The indices of the `count` largest scores and of ties with the smallest of them; largest first, stable."""
    ids = np.arange(len(scores))
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        ids = np.flatnonzero(scores >= least)
    return ids[np.argsort(-scores[ids], kind="stable")]


def _filter(weights: Floats, total: float | None, params: ResolvedSamplingParams) -> Floats:
    """Set the weights, sorted in descending order, that top_k, top_p and min_p drop to 0.

    `total` is the sum of the weights over the whole vocabulary, None with top_k.
    """
    if params.top_k:
        weights[params.top_k :] = 0
    # Probabilities for top_p are those after top_k; without it, those over the whole vocabulary.
    mass = _sum(weights) if total is None else total
    before = weights.cumsum(dtype=np.float64) - weights
    if params.top_p < 1:
        dropped = before >= params.top_p * mass
        dropped[0] = False
        weights[dropped] = 0
    weights[weights < _least(params)] = 0
    return weights


def _pick(weights: Floats, point: float) -> int:
    """The first index at which the cumulative probability exceeds the point."""
    sums = weights.cumsum(dtype=np.float64)
    return _first_beyond(weights, sums, point * sums[-1])


def _pick_in_blocks(weights: Floats, point: float) -> int:
    """Like `_pick`, for many float32 weights: the block is found first, then the index within it."""
    blocks = np.add.reduceat(weights, _starts(len(weights)), dtype=np.float64)
    sums = blocks.cumsum()
    target = point * sums[-1]
    block = _first_beyond(blocks, sums, target)
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    before = sums[block] - blocks[block]
    return block * BLOCK + _first_beyond(inside, before + inside.cumsum(dtype=np.float64), target)


def _first_beyond(weights: Floats, sums: Floats, target: float) -> int:
    place = int(np.searchsorted(sums, target, side="right"))
    # Rounding can put the target at the very end, after the last positive weight.
    return place if place < len(sums) else int(np.flatnonzero(weights)[-1])


@cache
def _starts(size: int) -> NDArray[np.int64]:
    return np.arange(0, size, BLOCK)
