"""α-entmax: sparse weights between softmax and sparsemax."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")
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
