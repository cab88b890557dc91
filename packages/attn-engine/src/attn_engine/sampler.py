"""Chooses the next token of every sequence of a batch from its logits.

Penalties, biases and constraints change the logits of a row; temperature, top_k, top_p, min_p and typical_p make a
distribution of it; a random number that depends on seed and position alone samples from it, so batching and preemption
change no token. Rows are taken one by one: a row stays in the processor's cache from its maximum to its sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from attn_schema import SamplingParams
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[Any]
BLOCK = 256
"""Logits reduced at once when a maximum or a sum is looked for."""
CANDIDATES = (256, 4096)
"""Most likely tokens looked at first where a filter needs them ranked; all are sorted only if these do not suffice."""
MIN_TEMPERATURE = 1e-30
"""Below it all probability is on the most likely tokens; its inverse is still a float32."""


@dataclass(frozen=True, eq=False)
class SamplingRow:
    """One row to choose a token for: its parameters, seed and the position of the new token.

    Where the parameters need them, all [vocab_size]: `seen`, bool, tokens that have occurred; `counts`, float32, how
    often each was generated; `allowed`, bool, tokens that may come next.
    """

    params: SamplingParams
    seed: int
    position: int
    seen: Tensor | None = None
    counts: Tensor | None = None
    allowed: Tensor | None = None

    @property
    def unchanged(self) -> bool:
        """Whether `process_logits` changes nothing."""
        return self.seen is self.counts is self.allowed is None and not self.params.logit_bias


def choose_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Token ids, one a row of logits [rows, vocab_size]; -1 where the logits of a row are not finite.

    The choice of a row depends on that row alone.
    """
    return [_choose(scores, row) for scores, row in zip(logits.detach().unbind(0), rows, strict=True)]


def _choose(logits: Tensor, row: SamplingRow) -> int:
    scores = (logits if row.unchanged else process_logits(logits, row)).float().cpu().numpy()
    if row.params.temperature == 0:
        return argmax(scores)
    return sample_token(scores, row.params, uniform(row.seed, row.position))


def greedy_tokens(logits: Tensor) -> list[int]:
    """The most likely token of each row of logits [rows, vocab_size]; the first of equal ones, -1 if not finite.

    The maximum of each block, then the position in the best block: on a CPU, torch finds a maximum ten times faster
    than its position, and with all threads.
    """
    missing = -logits.shape[-1] % BLOCK
    # Padding copies all logits, even with nothing.
    padded = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()
    blocks = padded.view(len(logits), -1, BLOCK)
    best = blocks.amax(-1).argmax(-1)
    values, places = blocks[torch.arange(len(logits), device=logits.device), best].max(-1)
    found: list[int] = (best * BLOCK + places).where(values.isfinite(), -1).tolist()
    return found


def log_probabilities(
    logits: Tensor, tokens: Sequence[int], top_logprobs: int
) -> list[tuple[float, list[tuple[int, float]]]]:
    """The log probability of a token, and the most likely (id, logprob), for each row of logits [rows, vocab_size]."""
    scores = logits.float().log_softmax(-1)
    own = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    values, ids = scores.topk(min(top_logprobs, scores.shape[-1]), dim=-1)
    pairs = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return list(zip(own, pairs, strict=True))


def process_logits(logits: Tensor, row: SamplingRow) -> Tensor:
    """Logits [vocab_size], float32, after penalties, logit_bias and constraints, in this order."""
    params = row.params
    logits = logits.float()
    penalty = params.repetition_penalty
    if penalty != 1 and row.seen is not None:
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(row.seen, penalized, logits)
    if row.counts is not None:
        logits = logits - params.frequency_penalty * row.counts - params.presence_penalty * (row.counts > 0)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits = logits.index_add(0, ids, bias)
    if row.allowed is not None:
        logits = logits.masked_fill(~row.allowed, -torch.inf)
    return logits


def uniform(seed: int, position: int) -> float:
    """A random number in [0, 1) for the token at `position`: 53 bits of a hash used as a counter-based generator."""
    counter = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little") >> 11
    return bits / 2**53


def argmax(scores: Floats) -> int:
    """The first of the largest of scores [vocab_size]; -1 if it is not finite."""
    place = int(scores.argmax())
    return place if np.isfinite(scores[place]) else -1


def sample_token(scores: Floats, params: SamplingParams, point: float) -> int:
    """The token at `point`, in [0, 1), of the cumulative distribution of logits [vocab_size], float32.

    -1 if the logits are not finite.
    """
    highest = scores.max()
    if not np.isfinite(highest):
        return -1
    if params.top_k or params.top_p < 1 or params.typical_p < 1:
        return _sample_ranked(scores, params, point)
    weights = _weights(scores, highest, params.temperature)
    if params.min_p:
        weights[weights < params.min_p] = 0
    return _pick_in_blocks(weights, point)


def _sample_ranked(scores: Floats, params: SamplingParams, point: float) -> int:
    """As `sample_token`, among the most likely tokens that include all that the filters keep."""
    total = None if params.top_k else float(_weights(scores, scores.max(), params.temperature).sum())
    ids, weights = np.arange(0), np.empty(0)
    for count in (*CANDIDATES, len(scores)):
        if count < len(scores) and (count < params.top_k or params.typical_p < 1):
            continue
        ids = _most_likely(scores, count)
        weights = _weights(scores[ids].astype(np.float64), scores[ids[0]], params.temperature)
        if params.top_k or count >= len(scores) or weights.sum() >= params.top_p * (total or 0.0):
            break
    kept = _filter_typical(_filter(weights, total, params), params.typical_p)
    return int(ids[_pick(kept, point)])


def _weights(scores: Floats, highest: Any, temperature: float) -> Floats:
    """exp((score - highest) / temperature)."""
    # Subtracting the highest first keeps tiny temperatures from overflowing; what is far below it becomes 0.
    with np.errstate(over="ignore"):
        weights = scores - highest
        weights *= 1 / max(temperature, MIN_TEMPERATURE)
    found: Floats = np.exp(weights, out=weights)
    return found


def _most_likely(scores: Floats, count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest scores, and of those equal to the least of them; largest first, stable."""
    ids = np.arange(len(scores))
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        ids = np.flatnonzero(scores >= least)
    return ids[np.argsort(-scores[ids], kind="stable")]


def _filter(weights: Floats, total: float | None, params: SamplingParams) -> Floats:
    """Weights, largest first, with those dropped by top_k, top_p and min_p set to 0; `total` is their sum over all."""
    if params.top_k:
        weights[params.top_k :] = 0
    # Probabilities for top_p are those after top_k; without it, those over the whole vocabulary.
    mass = weights.sum() if total is None else total
    before = weights.cumsum() - weights
    if params.top_p < 1:
        dropped = before >= params.top_p * mass
        dropped[0] = False
        weights[dropped] = 0
    weights[weights < params.min_p * weights[0]] = 0
    return weights


def _filter_typical(weights: Floats, mass: float) -> Floats:
    """Weights with those that typical_p drops set to 0; equally likely tokens are kept or dropped together."""
    if mass == 1:
        return weights
    probabilities = weights / weights.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probabilities)
        entropy = np.where(probabilities > 0, probabilities * surprise, 0).sum()
    distance = np.abs(surprise - entropy)
    order = np.argsort(distance, kind="stable")
    last = min(int((probabilities[order].cumsum() < mass).sum()), len(probabilities) - 1)
    return np.where(distance <= distance[order[last]], weights, 0)


def _pick(weights: Floats, point: float) -> int:
    """The first index whose cumulative probability exceeds the point."""
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
