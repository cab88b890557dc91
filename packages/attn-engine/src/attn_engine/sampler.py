"""Chooses the next token of every sequence of a batch from its logits.

Penalties, biases and constraints change the logits of a row; temperature, top_k, top_p, min_p and typical_p turn them
into a distribution; a random number that depends only on seed and position samples from it, so batching and preemption
change no token. Rows are processed one by one, so that a row stays in the CPU cache from its maximum to its sums.

Weights are integers, whose sums are all exact (`attn_core.kernels.sampling`), so that a kernel, where one is given,
chooses the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from attn_core.kernels.sampling import Draw, LogProbability, SamplingKernel, TokenCounts
from attn_schema.sampling import ResolvedSamplingParams
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[Any]
Choice = tuple[int, float | None, Sequence[tuple[int, float]]]
"""A token id (-1 if there is none), its log probability, and the most likely (id, logprob) pairs, if requested."""
BLOCK = 256
"""The number of logits that are reduced together to find a maximum or a sum."""
CANDIDATES = (256, 4096)
"""The numbers of most likely tokens that are ranked first; all tokens are ranked only if these do not suffice."""
MIN_TEMPERATURE = 1e-30
"""Below this temperature all probability is on the most likely tokens; its inverse still fits a float32."""
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


@dataclass(frozen=True, eq=False)
class SamplingRow:
    """One row to choose a token for: its parameters, seed and the position of the new token.

    `token_counts` are those of its sequence, given if the parameters have penalties. `allowed` [vocab_size], bool, are
    the tokens that may come next; None for all.
    """

    params: ResolvedSamplingParams
    seed: int
    position: int
    token_counts: TokenCounts | None = None
    allowed: Tensor | None = None

    @property
    def unchanged(self) -> bool:
        """Whether `process_logits` leaves the logits unchanged."""
        return self.token_counts is None and self.allowed is None and not self.params.logit_bias


def choose_tokens(logits: Tensor, rows: Sequence[SamplingRow], kernel: SamplingKernel | None = None) -> list[int]:
    """Choose a token id for each row of logits [rows, vocab_size]; -1 where the logits of a row are not finite.

    The choice for a row depends on that row alone. A `kernel` is used for all rows without typical_p.
    """
    logits = logits.detach()
    by_kernel = [] if kernel is None else [place for place, row in enumerate(rows) if row.params.typical_p == 1]
    if kernel is not None and len(by_kernel) == len(rows):
        return kernel.choose(logits, [_draw(row) for row in rows])
    found: dict[int, int] = {}
    if kernel is not None and by_kernel:
        chosen = kernel.choose(logits[torch.tensor(by_kernel)], [_draw(rows[place]) for place in by_kernel])
        found = dict(zip(by_kernel, chosen, strict=True))
    for place, (scores, row) in enumerate(zip(logits.unbind(0), rows, strict=True)):
        if place not in found:
            found[place] = _choose(scores, row)
    return [found[place] for place in range(len(rows))]


def _draw(row: SamplingRow) -> Draw:
    params = row.params
    return Draw(
        inverse_temperature=_inverse(params.temperature) if params.temperature else 0.0,
        point=uniform(row.seed, row.position) if params.temperature else 0.0,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias or {},
        token_counts=row.token_counts,
        allowed=row.allowed,
    )


def _choose(logits: Tensor, row: SamplingRow) -> int:
    scores = (logits if row.unchanged else process_logits(logits, row)).float().cpu().numpy()
    if row.params.temperature == 0:
        return argmax(scores)
    return sample_token(scores, row.params, uniform(row.seed, row.position))


def greedy_tokens(logits: Tensor) -> list[int]:
    """The most likely token of each row of logits [rows, vocab_size]: the first of equal ones, -1 if not finite."""
    found: list[int] = likeliest(logits).tolist()
    return found


def likeliest(logits: Tensor) -> Tensor:
    """Like `greedy_tokens`, as a tensor [rows], int64, on the device of the logits.

    Takes the maximum of each block, then the position in the best block: on a CPU, torch's max is ten times faster than
    its argmax, and uses all threads.
    """
    missing = -logits.shape[-1] % BLOCK
    # Pad only if necessary: even empty padding copies all logits.
    padded = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()
    blocks = padded.view(len(logits), -1, BLOCK)
    best = blocks.amax(-1).argmax(-1)
    values, places = blocks[torch.arange(len(logits), device=logits.device), best].max(-1)
    return (best * BLOCK + places).where(values.isfinite(), -1)


def log_probabilities(
    logits: Tensor, tokens: Sequence[int], top_logprobs: int, kernel: SamplingKernel | None = None
) -> list[LogProbability]:
    """For each row of logits [rows, vocab_size] the log probability of its token, and the most likely (id, logprob)."""
    if kernel is not None:
        return kernel.log_probabilities(logits.detach(), tokens, top_logprobs)
    scores = logits.float().log_softmax(-1)
    own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    values, ids = scores.topk(min(top_logprobs, scores.shape[-1]), dim=-1)
    pairs = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return list(zip(own, pairs, strict=True))


def process_logits(logits: Tensor, row: SamplingRow) -> Tensor:
    """Logits [vocab_size], float32, after penalties, logit_bias and constraints, in this order."""
    params = row.params
    logits = logits.float()
    if row.token_counts is not None:
        logits = _penalized(logits, params, row.token_counts)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(0, ids, bias)
    if row.allowed is not None:
        logits = logits.masked_fill(~row.allowed, -torch.inf)
    return logits


def _penalized(logits: Tensor, params: ResolvedSamplingParams, occurred: TokenCounts) -> Tensor:
    # An embedding may have more rows than there are logits.
    known = [(token, count) for token, count in zip(occurred.ids, occurred.counts, strict=True) if token < len(logits)]
    ids = torch.tensor([token for token, _ in known], dtype=torch.int64, device=logits.device)
    counts = torch.tensor([count for _, count in known], dtype=logits.dtype, device=logits.device)
    scores, penalty = logits[ids], params.repetition_penalty
    if penalty != 1:
        scores = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return logits.index_copy(0, ids, scores)


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1) for the token at `position`: 53 bits of a hash used as a counter-based generator."""
    counter = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little") >> 11
    return bits / 2**53


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
    if params.top_k or params.top_p < 1 or params.typical_p < 1:
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
        if count < len(scores) and (count < params.top_k or params.typical_p < 1):
            continue
        ids = _most_likely(scores, count)
        weights = _weights(scores[ids], scores[ids[0]], params.temperature)
        if params.top_k or count >= len(scores) or _sum(weights) >= params.top_p * (total or 0.0):
            break
    kept = _filter_typical(_filter(weights, total, params), params.typical_p)
    return int(ids[_pick(kept, point)])


def _weights(scores: Floats, highest: Any, temperature: float) -> Floats:
    """The weights round(2^32 · e^((score - highest) / temperature)), float32; kernels compute them bit for bit."""
    # Subtracting the highest score first prevents overflow at tiny temperatures; scores far below it get weight 0.
    with np.errstate(over="ignore"):
        x = (scores - highest) * np.float32(_inverse(temperature))
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


def _inverse(temperature: float) -> float:
    return 1 / max(temperature, MIN_TEMPERATURE)


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


def _filter_typical(weights: Floats, mass: float) -> Floats:
    """Set the weights that typical_p drops to 0; equally likely tokens are kept or dropped together."""
    if mass == 1:
        return weights
    probabilities = weights / _sum(weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probabilities)
        entropy = np.where(probabilities > 0, probabilities * surprise, 0).sum()
    distance = np.abs(surprise - entropy)
    order = np.argsort(distance, kind="stable")
    last = min(int((probabilities[order].cumsum() < mass).sum()), len(probabilities) - 1)
    return np.where(distance <= distance[order[last]], weights, 0)


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
