"""Agreement between explanations, and tests of whether other attention weights give the same output.

The tests of Jain and Wallace 2019 (arXiv 1902.10186): correlation with gradients and with leave-one-out, permuted and
adversarial weights. Those of Wiegreffe and Pinter 2019 (arXiv 1908.04626) retrain the model; the experiment of CL-58
has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from attn_core.errors import InvalidValue
from torch import Tensor

OutputOf = Callable[[Tensor], Tensor]
"""Computes probabilities [batch, classes] from attention weights [batch, tokens], with all else in the model fixed."""


def kendall_tau(one: Tensor, other: Tensor) -> float:
    """Kendall's τ-b of two rankings [tokens]: 1 for the same order, -1 for the reverse, 0 where one is constant."""
    if one.shape != other.shape or one.ndim != 1:
        raise InvalidValue.of("rankings", (list(one.shape), list(other.shape)), "two of as many tokens")
    above = torch.triu(torch.ones(len(one), len(one), dtype=torch.bool), 1)
    first, second = (torch.sign(rows[:, None] - rows[None])[above].double() for rows in (one, other))
    scale = (first.abs().sum() * second.abs().sum()).sqrt()
    return float((first * second).sum() / scale) if scale else 0.0


def total_variation(one: Tensor, other: Tensor) -> Tensor:
    """Half the sum of the absolute differences of distributions [..., classes]: from 0 to 1."""
    return (one - other).abs().sum(-1) / 2


def jensen_shannon(one: Tensor, other: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of distributions [..., tokens] in nats: from 0 to log 2."""
    middle = (one + other) / 2

    def apart(rows: Tensor) -> Tensor:
        return (torch.xlogy(rows, rows) - torch.xlogy(rows, middle.clamp(min=1e-300))).sum(-1)

    return (apart(one) + apart(other)) / 2


def permuted_change(weights: Tensor, output_of: OutputOf, times: int, generator: torch.Generator) -> Tensor:
    """The total variation [batch] of the output after shuffling each row of weights: the median of `times` shuffles."""
    before = output_of(weights)
    changes = []
    for _ in range(times):
        order = torch.rand(weights.shape, generator=generator).argsort(-1)
        changes.append(total_variation(before, output_of(weights.gather(-1, order))))
    return torch.stack(changes).median(0).values


class Adversary(NamedTuple):
    """Adversarial weights [batch, tokens], their divergence from the model's, and the output's change, [batch] each."""

    weights: Tensor
    divergence: Tensor
    change: Tensor


def adversarial_weights(
    weights: Tensor, output_of: OutputOf, *, most: float = 0.01, steps: int = 200, rate: float = 0.1
) -> Adversary:
    """Search for weights far from the model's whose output differs by at most `most` in total variation.

    Gradient ascent on the Jensen-Shannon divergence minus a penalty for exceeding `most`, from three random starts
    (equations 4 to 6 of Jain and Wallace). Returns the best weights within the bound, or the model's own if there are
    none.
    """
    before, best = output_of(weights).detach(), weights.clone()
    divergence = torch.zeros(len(weights), dtype=weights.dtype)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        start = torch.log(weights.clamp(min=1e-6)) + 3 * torch.randn(weights.shape, generator=generator)
        logits = start.to(weights.dtype).requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=rate)
        for _ in range(steps):
            given = logits.softmax(-1)
            apart, moved = jensen_shannon(given, weights), total_variation(output_of(given), before)
            with torch.no_grad():
                better = (moved <= most) & (apart > divergence)
                best = torch.where(better[:, None], given, best)
                divergence = torch.where(better, apart, divergence)
            loss = (100 * (moved - most).clamp(min=0) - apart).sum()
            (logits.grad,) = torch.autograd.grad(loss, [logits])
            optimizer.step()
    with torch.no_grad():
        return Adversary(best, divergence, total_variation(output_of(best), before))
