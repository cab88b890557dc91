"""Functions from scores to attention weights: softmax, sparsemax, entmax and others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attn_core.distributions import LocalGaussian
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from attn_variants.compute.pairs import Pairs

NEVER = float("-inf")


def softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """exp(e - max e) / Σ over the last axis; a row of -inf gives zeros and no gradient, never NaN."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    # Shifting by the largest score changes nothing but the range of exp, so no gradient need pass through it.
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    powers = torch.exp(scores - largest)
    total = powers.sum(-1, keepdim=True)
    return powers / total.masked_fill(total == 0, 1.0)


def softmax_with_sink(scores: Tensor, allowed: Tensor | None, logit: Tensor) -> Tensor:
    """exp(e) / (exp(s) + Σ exp(e)) over the last axis of scores [..., key]; the logit s broadcasts with [..., 1]."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    # Shifting all scores and the logit changes nothing but the range of exp, so no gradient need pass through it.
    largest = torch.maximum(scores.detach().amax(-1, keepdim=True), logit.detach())
    powers = torch.exp(scores - largest)
    return powers / (powers.sum(-1, keepdim=True) + torch.exp(logit - largest))


def sigmoid(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """σ(e - ln n), n the number of allowed keys in the row of scores [..., key]."""
    if allowed is None:
        count = scores.new_full((), scores.shape[-1])
        return torch.sigmoid(scores - count.log())
    count = visible(scores, allowed).clamp(min=1).to(scores.dtype)
    return torch.sigmoid(scores - count.log()).masked_fill(~allowed, 0.0)


def visible(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """How many keys every row of scores [..., key] may see, int64, broadcasts with [..., 1]."""
    if allowed is None:
        return torch.full((), scores.shape[-1], dtype=torch.int64, device=scores.device)
    return allowed.expand(*allowed.shape[:-1], scores.shape[-1]).sum(-1, keepdim=True)


def sparsemax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """The Euclidean projection onto the simplex over the last axis (Martins and Astudillo 2016, algorithm 1)."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    largest = scores.detach().amax(-1, keepdim=True)
    empty = largest == NEVER
    shifted = (scores - largest.masked_fill(empty, 0.0)).masked_fill(empty, 0.0)
    ordered = shifted.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    counts = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    # At least one: a row with a NaN compares with nothing, and its weights are NaN.
    support = (1 + counts * ordered > sums).sum(-1, keepdim=True).clamp(min=1)
    threshold = (sums.gather(-1, support - 1) - 1) / support
    return (shifted - threshold).clamp(min=0.0).masked_fill(empty, 0.0)


HALVINGS = 50
"""Bisection steps; each halves an interval that is 1 wide."""


def entmax15(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """1.5-entmax over the last axis, its threshold found by sorting (Peters et al. 2019, algorithm 2)."""
    shifted, empty = below_largest(scores, allowed)
    alpha = shifted.new_full((), 1.5)
    with torch.no_grad():
        threshold = sorted_threshold(shifted / 2)
    return weights_above(shifted, threshold, alpha).masked_fill(empty, 0.0)


def entmax(scores: Tensor, allowed: Tensor | None, alpha: Tensor) -> Tensor:
    """α-entmax over the last axis of scores [..., key]; `alpha`, above 1, broadcasts with [..., 1].

    `allowed` broadcasts with the scores, True keeps; a row without a key gives zeros. The threshold is found by
    bisection.
    """
    shifted, empty = below_largest(scores, allowed)
    with torch.no_grad():
        threshold = bisected_threshold(shifted * (alpha - 1), 1 / (alpha - 1))
    return weights_above(shifted, threshold, alpha).masked_fill(empty, 0.0)


def below_largest(scores: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores less the largest of their row, -inf where not allowed, and which rows [..., 1] are empty, those all 0.

    A shift changes no weight, so no gradient need pass through it.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    largest = scores.detach().amax(-1, keepdim=True)
    empty = largest == NEVER
    return (scores - largest.masked_fill(empty, 0.0)).masked_fill(empty, 0.0), empty


def sorted_threshold(z: Tensor) -> Tensor:
    """The threshold τ [..., 1] with Σ [z - τ]₊² = 1 of z [..., key], whose largest is 0."""
    # What is below -1 is never in the support, and -inf would make not-a-number of the sums of squares.
    ordered = z.clamp(min=-2.0).sort(-1, descending=True).values
    counts = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    mean, square = ordered.cumsum(-1) / counts, (ordered * ordered).cumsum(-1) / counts
    spread = (1 / counts - square + mean * mean).clamp(min=0.0)
    thresholds = mean - spread.sqrt()
    # At least one: a row with a NaN compares with nothing.
    support = (thresholds <= ordered).sum(-1, keepdim=True).clamp(min=1)
    return thresholds.gather(-1, support - 1)


def bisected_threshold(z: Tensor, power: Tensor) -> Tensor:
    """The threshold τ [..., 1] with Σ [z - τ]₊^power = 1 of z [..., key], whose largest is 0; from below."""
    low = torch.zeros_like(z[..., :1]) - 1
    width = 1.0
    for _ in range(HALVINGS):
        width /= 2
        total = ((z - low - width).clamp(min=0.0) ** power).sum(-1, keepdim=True)
        low = torch.where(total >= 1, low + width, low)
    return low


def weights_above(shifted: Tensor, threshold: Tensor, alpha: Tensor) -> Tensor:
    """[(α-1) e - τ]₊^(1/(α-1)) of shifted scores [..., key], after one Newton step of τ [..., 1].

    The step brings the sum to 1 as well as the type can, and because τ is given as a constant, differentiating the
    step gives τ the gradient that the sum's being 1 implies; so gradients to scores and α are exact for the support.
    """
    power = 1 / (alpha - 1)
    support = shifted.detach() * (alpha.detach() - 1) > threshold
    z = shifted.masked_fill(~support, 0.0) * (alpha - 1)
    # Ones stand where nothing is raised to a power: the gradient of 0 ** power need not be finite.
    base = torch.where(support, z - threshold, 1.0)
    excess = torch.where(support, base**power, 0.0).sum(-1, keepdim=True) - 1
    slope = torch.where(support, power * base ** (power - 1), 0.0).sum(-1, keepdim=True).detach()
    exact = z - threshold - excess / slope
    positive = support & (exact.detach() > 0)
    return torch.where(positive, torch.where(positive, exact, 1.0) ** power, 0.0)


def hard(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """One on the largest of scores [..., key], the first of equals, zeros elsewhere and in rows without a key."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    chosen = scores.detach().argmax(-1, keepdim=True)
    found = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    return found.masked_fill(scores.detach().amax(-1, keepdim=True) == NEVER, 0.0)


def stick_breaking(pairs: Pairs, scores: Tensor) -> Tensor:
    """σ(e_j) Π_{k > j} (1 - σ(e_k)) over the allowed keys of scores [batch, heads, query, key]; see `StickBreaking`."""
    if pairs.operands.key_positions is None:
        return broken(scores, pairs.allowed)
    # A store may keep rows in another order than that in which they came.
    order = pairs.places[1].argsort(-1).expand(scores.shape)
    allowed = pairs.allowed
    ordered = None if allowed is None else allowed.expand(scores.shape).gather(-1, order)
    weights = broken(scores.gather(-1, order), ordered)
    return torch.zeros_like(weights).scatter(-1, order, weights)


def broken(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """The weights of scores whose keys, the last axis, stand in the order of their positions."""
    left, taken = logsigmoid(-scores), logsigmoid(scores)
    if allowed is not None:
        left = left.masked_fill(~allowed, 0.0)
    # What all later keys leave, summed from the end; taking the key's own off a whole sum would lose small weights.
    later = pad(left[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    weights = torch.exp(taken + later)
    return weights if allowed is None else weights.masked_fill(~allowed, 0.0)


def local_gaussian(distribution: LocalGaussian, pairs: Pairs, scores: Tensor) -> Tensor:
    """Softmax within the window around the place that each query names, times the Gaussian; see `LocalGaussian`."""
    count = visible(scores, pairs.allowed)
    centre = count * torch.sigmoid(share(pairs.query, pairs.weights("distribution")))
    return around(distribution.radius, scores, pairs.allowed, centre, places_of_real(pairs))


def places_of_real(pairs: Pairs) -> Tensor:
    """The positions of keys [batch or 1, 1, 1, key], of real ones as they are without padding, wherever that stands."""
    places, real = pairs.places[1], pairs.operands.key_padding_mask
    if real is None or pairs.operands.key_positions is not None:
        return places
    return places - (~real).cumsum(-1)[:, None, None, :]


def share(query: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """vᵀ tanh(W q) [batch, heads, query, 1] of queries [batch, heads, query, key_size]."""
    hidden = torch.tanh(torch.matmul(query, weights["weight"]))
    return torch.matmul(hidden, weights["vector"][..., None])


def around(radius: int, scores: Tensor, allowed: Tensor | None, centre: Tensor, places: Tensor) -> Tensor:
    """Weights of scores [batch, heads, query, key] around `centre` [batch, heads, query, 1].

    `places` [batch or 1, 1, 1, key] are the positions of the keys. Keys further than `radius` from the centre get none.
    """
    distance = places - centre
    near = distance.detach().abs() <= radius
    weights = softmax(scores, near if allowed is None else near & allowed)
    return weights * torch.exp(-(distance**2) / (2 * (radius / 2) ** 2))
