"""Sparsemax."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


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
