"""All weight on one key."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


def hard(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """One on the largest of scores [..., key], the first of equals, zeros elsewhere and in rows without a key."""
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NEVER)
    chosen = scores.detach().argmax(-1, keepdim=True)
    found = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    return found.masked_fill(scores.detach().amax(-1, keepdim=True) == NEVER, 0.0)
