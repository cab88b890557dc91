"""Functions from scores to attention weights: softmax, sparsemax, entmax and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attn_core.distributions import LocalGaussian
from attn_core.kernels.base import batch_invariant
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from attn_variants.compute.pairs import Pairs

NEVER = float("-inf")


def softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the last axis; a row of -inf gives zeros and no gradient, never NaN."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    if batch_invariant():
        return torch._safe_softmax(scores, -1)  # noqa: SLF001 -- the softmax of kernels, but of empty rows
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


HALVINGS = 56
"""Bisection steps; each halves the interval."""

LARGEST_SHIFT = 45.0
"""More than ln n for any number of keys n."""


def entmax15(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """1.5-entmax over the last axis; the threshold is found by sorting (Peters et al. 2019, algorithm 2)."""
    shifted, empty = below_largest(scores, allowed)
    with torch.no_grad():
        shift = 2 * (sorted_threshold(shifted / 2) + 1)
    weights: Tensor = _Entmax.apply(shifted, 0.5, shift)  # type: ignore[no-untyped-call]
    return weights.masked_fill(empty, 0.0)


def entmax(scores: Tensor, allowed: Tensor | None, excess: Tensor | float) -> Tensor:
    """α-entmax over the last axis of scores [..., key]; `excess`, α - 1 above 0, broadcasts with [..., 1].

    `allowed` is bool, broadcasts with the scores and is True for keys to keep; a row without one gives zeros. The
    threshold is found by bisection.
    """
    shifted, empty = below_largest(scores, allowed)
    with torch.no_grad():
        shift = bisected_shift(shifted, excess)
    weights: Tensor = _Entmax.apply(shifted, excess, shift)  # type: ignore[no-untyped-call]
    return weights.masked_fill(empty, 0.0)


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


def powers_above(shifted: Tensor, excess: Tensor | float, shift: Tensor) -> Tensor:
    """[1 + u (e - t)]₊^(1/u) for scores e [..., key] with a maximum of 0, `excess` u = α - 1 and the shift t [..., 1].

    This is [(α-1) e - τ]₊^(1/(α-1)) with τ = u t - 1. In this form rounding does not grow as α approaches 1, where the
    result is exp(e - t).
    """
    inside = excess * (shifted - shift)
    outside = inside <= -1  # False for NaN, which is not hidden
    return torch.exp(torch.log1p(inside.masked_fill(outside, 0.0)) / excess).masked_fill(outside, 0.0)


def bisected_shift(shifted: Tensor, excess: Tensor | float) -> Tensor:
    """The shift t [..., 1] with which `powers_above` sum to 1, for scores with a maximum of 0; a lower bound of it."""
    low = torch.zeros_like(shifted[..., :1])
    width = LARGEST_SHIFT
    for _ in range(HALVINGS):
        width /= 2
        total = powers_above(shifted, excess, low + width).sum(-1, keepdim=True)
        low = torch.where(total >= 1, low + width, low)
    return low


class _Entmax(torch.autograd.Function):
    """The weights of `powers_above` after one Newton step of the shift, which brings their sum to 1.

    With s = p^(2 - α), dp = s (v - Σ s v / Σ s), where v = de or, for α, v = ((p^u - 1) / u - p^u ln p) / u (Peters
    et al. 2019; Correia et al. 2019). The backward pass consists of operations on p, so that it can be differentiated
    again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(shifted: Tensor, excess: Tensor | float, shift: Tensor) -> Tensor:
        """The weights [..., key]."""
        weights = powers_above(shifted, excess, shift)
        over = weights.sum(-1, keepdim=True) - 1
        step = over / support_powers(weights, excess).sum(-1, keepdim=True)
        return powers_above(shifted, excess, shift + step)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the weights, and α if it is learned."""
        excess, learned = inputs[1], isinstance(inputs[1], Tensor)
        ctx.fixed = None if learned else excess
        ctx.save_for_backward(output, *([excess] if learned else []))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """The gradients of scores and of α."""
        weights, *learned = ctx.saved_tensors
        excess = learned[0] if learned else ctx.fixed
        powers = support_powers(weights, excess)
        mean = (powers * gradients[0]).sum(-1, keepdim=True) / powers.sum(-1, keepdim=True)
        inner = powers * (gradients[0] - mean)
        if not learned:
            return inner, None, None
        logs = weights.masked_fill(weights == 0, 1.0).log()
        curve = torch.expm1(excess * logs) / excess - torch.exp(excess * logs) * logs
        return inner, (inner * curve / excess).sum_to_size(excess.shape), None


def support_powers(weights: Tensor, excess: Tensor | float) -> Tensor:
    """p^(2 - α) where p is positive, else 0, for `excess` α - 1."""
    outside = weights == 0
    powers: Tensor = weights.masked_fill(outside, 1.0) ** (1 - excess)
    return powers.masked_fill(outside, 0.0)


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
