"""Weights that break a stick, the latest key first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from attn_variants.compute.pairs import Pairs


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
