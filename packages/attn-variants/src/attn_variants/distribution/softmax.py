"""Softmax."""

from __future__ import annotations

import torch
from torch import Tensor

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
