"""Weights that need not sum to one: a head may attend to nothing."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


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
