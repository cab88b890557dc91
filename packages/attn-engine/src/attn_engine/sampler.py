"""Chooses the next token of every sequence of a batch from its logits.

Penalties, biases and constraints change the logits of a row; temperature, top_k, top_p, min_p and typical_p turn them
into a distribution; a random number that depends only on seed and position samples from it, so batching and preemption
change no token. On a CPU rows are processed one by one, so that the choice for a row depends on that row alone;
`batch_sampler` processes a whole batch on a device. Where filters need ranked tokens, only the most likely ones are
ranked first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from attn_core.kernels.sampling import Draw, LogProbability, SamplingKernel, TokenCounts
from attn_schema.sampling import FILTERS, NEUTRAL, ResolvedSamplingParams
from torch import Tensor

Choice = tuple[int, float | None, Sequence[tuple[int, float]]]
"""A token id (-1 if there is none), its log probability, and the most likely (id, logprob) pairs, if requested."""
BLOCK = 256
"""The number of logits that are reduced together to find a maximum or a sum."""
CANDIDATES = 1024
"""The number of most likely tokens that are ranked first."""
UNKNOWN = -2
"""The token value that marks a row which needs more candidates."""
MIN_TEMPERATURE = 1e-30
"""Below this temperature all probability is on the most likely tokens; its inverse still fits a float32."""


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

    The choice for a row depends on that row alone. A `kernel` is used for all rows whose filters it knows.
    """
    logits = logits.detach()
    by_kernel = [] if kernel is None else [place for place, row in enumerate(rows) if drawn_by_kernels(row.params)]
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


def drawn_by_kernels(params: ResolvedSamplingParams) -> bool:
    """Whether kernels know all filters that these parameters have."""
    return all(getattr(params, name) == NEUTRAL[name] for name in FILTERS if name not in Draw._fields)


def _draw(row: SamplingRow) -> Draw:
    params = row.params
    return Draw(
        inverse_temperature=1 / max(params.temperature, MIN_TEMPERATURE) if params.temperature else 0.0,
        point=uniform(row.seed, row.position) if params.temperature else 0.0,
        **{name: getattr(params, name) for name in FILTERS if name in Draw._fields},
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias or {},
        token_counts=row.token_counts,
        allowed=row.allowed,
    )


def _choose(logits: Tensor, row: SamplingRow) -> int:
    scores = (logits if row.unchanged else process_logits(logits, row)).float()
    if row.params.temperature == 0:
        return int(likeliest(scores[None]))
    return sample_token(scores.cpu(), row.params, uniform(row.seed, row.position))


def sample_token(scores: Tensor, params: ResolvedSamplingParams, point: float) -> int:
    """The token at `point`, in [0, 1), of the cumulative distribution of logits [vocab_size], float32, on the CPU.

    Returns -1 if the logits are not finite.
    """
    if not scores.max().isfinite():
        return -1
    choose, size = chooser_of(params), len(scores)
    columns = torch.tensor(parameters_of(params, point), dtype=torch.float64)[:, None]
    parameters, row = RowParameters(*columns.unbind(0)), scores[None]
    token = int(choose(row, parameters, CANDIDATES))
    return int(choose(row, parameters, size)) if token == UNKNOWN else token


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


def parameters_of(params: ResolvedSamplingParams, point: float) -> tuple[float, ...]:
    """The fields of `RowParameters` of one row."""
    inverse = 1 / max(params.temperature, MIN_TEMPERATURE)
    return inverse, params.top_k, params.top_p, params.min_p, params.typical_p, point


def chooser_of(params: ResolvedSamplingParams) -> TokenChooser:
    """The function that chooses tokens under these parameters."""
    if params.temperature == 0:
        return greedy
    if params.typical_p < 1:
        return typical
    return ranked if params.top_k or params.top_p < 1 else weighted


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
