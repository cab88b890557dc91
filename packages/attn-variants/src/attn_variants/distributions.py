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
    """Softmax over the last axis; a row of -inf gives zeros and no gradient, never NaN."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    # Shifting by the largest score only keeps exp in range and does not change the result: no gradient is needed.
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    powers = torch.exp(scores - largest)
    total = powers.sum(-1, keepdim=True)
    return powers / total.masked_fill(total == 0, 1.0)


def softmax_with_sink(scores: Tensor, allowed: Tensor | None, logit: Tensor) -> Tensor:
    """exp(e) / (exp(s) + Σ exp(e)) over the last axis of scores [..., key]; the logit s broadcasts with [..., 1]."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    # Shifting all scores and the logit only keeps exp in range and does not change the result: no gradient is needed.
    largest = torch.maximum(scores.detach().amax(-1, keepdim=True), logit.detach())
    powers = torch.exp(scores - largest)
    return powers / (powers.sum(-1, keepdim=True) + torch.exp(logit - largest))


def sigmoid(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """σ(e - ln n) of scores [..., key], where n is the number of allowed keys in the row."""
    if allowed is None:
        count = scores.new_full((), scores.shape[-1])
        return torch.sigmoid(scores - count.log())
    count = visible(scores, allowed).clamp(min=1).to(scores.dtype)
    return torch.sigmoid(scores - count.log()).masked_fill(~allowed, 0.0)


def visible(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """The number of allowed keys in every row of scores [..., key], int64, broadcastable with [..., 1]."""
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
    # At least one: comparisons with NaN are all False, and the weights of such a row are NaN.
    support = (1 + counts * ordered > sums).sum(-1, keepdim=True).clamp(min=1)
    threshold = (sums.gather(-1, support - 1) - 1) / support
    return (shifted - threshold).clamp(min=0.0).masked_fill(empty, 0.0)


HALVINGS = 50
"""Bisection steps; each halves an interval that is 1 wide."""


def entmax15(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """1.5-entmax over the last axis; the threshold is found by sorting (Peters et al. 2019, algorithm 2)."""
    shifted, empty = below_largest(scores, allowed)
    alpha = shifted.new_full((), 1.5)
    with torch.no_grad():
        threshold = sorted_threshold(shifted / 2)
    return weights_above(shifted, threshold, alpha).masked_fill(empty, 0.0)


def entmax(scores: Tensor, allowed: Tensor | None, alpha: Tensor) -> Tensor:
    """α-entmax over the last axis of scores [..., key]; `alpha`, above 1, broadcasts with [..., 1].

    `allowed` is bool, broadcasts with the scores and is True for keys to keep; a row without one gives zeros. The
    threshold is found by bisection.
    """
    shifted, empty = below_largest(scores, allowed)
    with torch.no_grad():
        threshold = bisected_threshold(shifted * (alpha - 1), 1 / (alpha - 1))
    return weights_above(shifted, threshold, alpha).masked_fill(empty, 0.0)


def below_largest(scores: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores minus the largest of their row, -inf where not allowed; and whether each row [..., 1] allows no key.

    Rows that allow no key are all 0. The shift does not change the weights, so no gradient passes through it.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    largest = scores.detach().amax(-1, keepdim=True)
    empty = largest == NEVER
    return (scores - largest.masked_fill(empty, 0.0)).masked_fill(empty, 0.0), empty


def sorted_threshold(z: Tensor) -> Tensor:
    """The threshold τ [..., 1] with Σ [z - τ]₊² = 1 for z [..., key] with a maximum of 0."""
    # Entries below -1 are never in the support; -inf would make the sums of squares NaN.
    ordered = z.clamp(min=-2.0).sort(-1, descending=True).values
    counts = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    mean, square = ordered.cumsum(-1) / counts, (ordered * ordered).cumsum(-1) / counts
    spread = (1 / counts - square + mean * mean).clamp(min=0.0)
    thresholds = mean - spread.sqrt()
    # At least one: comparisons with NaN are all False.
    support = (thresholds <= ordered).sum(-1, keepdim=True).clamp(min=1)
    return thresholds.gather(-1, support - 1)


def bisected_threshold(z: Tensor, power: Tensor) -> Tensor:
    """The threshold τ [..., 1] with Σ [z - τ]₊^power = 1 for z [..., key] with a maximum of 0; a lower bound of it."""
    low = torch.zeros_like(z[..., :1]) - 1
    width = 1.0
    for _ in range(HALVINGS):
        width /= 2
        total = ((z - low - width).clamp(min=0.0) ** power).sum(-1, keepdim=True)
        low = torch.where(total >= 1, low + width, low)
    return low


def weights_above(shifted: Tensor, threshold: Tensor, alpha: Tensor) -> Tensor:
    """[(α-1) e - τ]₊^(1/(α-1)) of shifted scores [..., key], after one Newton step of τ [..., 1].

    The step brings the sum to 1 up to the precision of the dtype. As τ is passed as a constant, differentiating the
    step gives τ the gradient that follows from the constraint Σ = 1 (implicit differentiation); so the gradients with
    respect to scores and α are exact for the support.
    """
    power = 1 / (alpha - 1)
    support = shifted.detach() * (alpha.detach() - 1) > threshold
    z = shifted.masked_fill(~support, 0.0) * (alpha - 1)
    # The base is 1 outside the support, because the gradient of 0 ** power may be infinite.
    base = torch.where(support, z - threshold, 1.0)
    excess = torch.where(support, base**power, 0.0).sum(-1, keepdim=True) - 1
    slope = torch.where(support, power * base ** (power - 1), 0.0).sum(-1, keepdim=True).detach()
    exact = z - threshold - excess / slope
    positive = support & (exact.detach() > 0)
    return torch.where(positive, torch.where(positive, exact, 1.0) ** power, 0.0)


def hard(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """One-hot weights at the first of the largest scores [..., key]; zeros in rows without a key."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    chosen = scores.detach().argmax(-1, keepdim=True)
    found = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    return found.masked_fill(scores.detach().amax(-1, keepdim=True) == NEVER, 0.0)


def stick_breaking(pairs: Pairs, scores: Tensor) -> Tensor:
    """σ(e_j) Π_{k > j} (1 - σ(e_k)) over the allowed keys of scores [batch, heads, query, key]; see `StickBreaking`."""
    if pairs.operands.key_positions is None:
        return broken(scores, pairs.allowed)
    # A cache may keep rows in an order other than that of their positions.
    order = pairs.places[1].argsort(-1).expand(scores.shape)
    allowed = pairs.allowed
    ordered = None if allowed is None else allowed.expand(scores.shape).gather(-1, order)
    weights = broken(scores.gather(-1, order), ordered)
    return torch.zeros_like(weights).scatter(-1, order, weights)


def broken(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Stick-breaking weights of scores [..., key] whose keys are in the order of their positions."""
    left, taken = logsigmoid(-scores), logsigmoid(scores)
    if allowed is not None:
        left = left.masked_fill(~allowed, 0.0)
    # Sum over all later keys, from the end; subtracting a key's own term from the whole sum would lose precision.
    later = pad(left[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
    weights = torch.exp(taken + later)
    return weights if allowed is None else weights.masked_fill(~allowed, 0.0)


def local_gaussian(distribution: LocalGaussian, pairs: Pairs, scores: Tensor) -> Tensor:
    """Softmax within a window around the centre that each query predicts, times a Gaussian; see `LocalGaussian`."""
    count = visible(scores, pairs.allowed)
    centre = count * torch.sigmoid(share(pairs.query, pairs.weights("distribution")))
    return around(distribution.radius, scores, pairs.allowed, centre, places_of_real(pairs))


def places_of_real(pairs: Pairs) -> Tensor:
    """The positions of keys [batch or 1, 1, 1, key]; padding, on either side, is not counted for real keys."""
    places, real = pairs.places[1], pairs.operands.key_padding_mask
    if real is None or pairs.operands.key_positions is not None:
        return places
    return places - (~real).cumsum(-1)[:, None, None, :]


def share(query: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """vᵀ tanh(W q), [batch, heads, query, 1], of queries [batch, heads, query, key_size]."""
    hidden = torch.tanh(torch.matmul(query, weights["weight"]))
    return torch.matmul(hidden, weights["vector"][..., None])


def around(radius: int, scores: Tensor, allowed: Tensor | None, centre: Tensor, places: Tensor) -> Tensor:
    """Softmax of scores [batch, heads, query, key], times a Gaussian around `centre` [batch, heads, query, 1].

    `places` [batch or 1, 1, 1, key] are the positions of the keys. Keys further than `radius` from the centre get
    weight 0.
    """
    distance = places - centre
    near = distance.detach().abs() <= radius
    weights = softmax(scores, near if allowed is None else near & allowed)
    return weights * torch.exp(-(distance**2) / (2 * (radius / 2) ** 2))
