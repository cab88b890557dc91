"""Distribution functions: scores to weights over the allowed keys."""

from __future__ import annotations

import torch
from attn_core import Distribution
from attn_core.errors import InvalidValue
from torch import Tensor

NEVER = float("-inf")


def distribute(distribution: Distribution, scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Weights of scores [..., key]; `allowed` broadcasts with them, True keeps. Rows without a key give zeros."""
    if distribution.kind == "softmax":
        return softmax(scores, allowed)
    if distribution.kind == "sparsemax":
        return sparsemax(scores, allowed)
    raise InvalidValue.of("distribution", distribution.kind, "softmax, sparsemax")


def softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """exp(e - max e) / Σ over the last axis; a row of -inf gives zeros and no gradient, never NaN."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    # Shifting by the largest score changes nothing but the range of exp, so no gradient need pass through it.
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    powers = torch.exp(scores - largest)
    total = powers.sum(-1, keepdim=True)
    return powers / total.masked_fill(total == 0, 1.0)


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
    support = (1 + counts * ordered > sums).sum(-1, keepdim=True)
    threshold = (sums.gather(-1, support - 1) - 1) / support
    return (shifted - threshold).clamp(min=0.0).masked_fill(empty, 0.0)
