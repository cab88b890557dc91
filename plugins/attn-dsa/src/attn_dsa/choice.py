"""The best tokens of a query."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


def choose(scores: Tensor, allowed: Tensor, top: int) -> Tensor:
    """Bool [batch, query, key]: the `top` allowed keys of largest score, all where there are fewer.

    Of equal scores, which are common where ReLU gives 0, those further back in the memory win: the same ones however
    many tokens are computed at once. There must be at least `top` keys.
    """
    with torch.no_grad():
        scores = scores.masked_fill(~allowed, NEVER)
        least = scores.topk(top, dim=-1).values[..., -1:]
        better, equal = scores > least, scores == least
        places = top - better.sum(-1, keepdim=True)
        behind = equal.sum(-1, keepdim=True) - equal.cumsum(-1)
        return (better | equal & (behind < places)) & allowed
