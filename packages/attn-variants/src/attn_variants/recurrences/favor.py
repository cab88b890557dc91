"""FAVOR+: softmax attention by positive random features, stable at every prefix (Choromanski et al. 2021, 2009.14794).

A feature is e^(ω·x - |x|²/2), kept as its logarithm until the largest one seen so far is known. That maximum cancels in
the quotient but for ε, which is added to every feature relative to it. As the maximum grows, older sums fade: a linear
recurrence with one decay a head.

Shapes: log features [batch, tokens, heads, features]; values [batch, tokens, heads, value_size + 1], the last column
one, all zero where a token is padded; results [batch, tokens, heads, value_size + 1].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core.kernels.plans import RecurrencePlan
from attn_core.kernels.recurrence import Steps
from torch import Tensor

from attn_variants.recurrences.parallel import effective_weights


class Memory(NamedTuple):
    """What is remembered of all earlier tokens.

    `sums` [batch, heads, features, value_size + 1] relative to the largest log feature `top` [batch, heads]; `seen`
    [batch, heads, value_size + 1], the plain sum of values. Where the last entry of `seen`, a count, is zero, `top`
    means nothing.
    """

    sums: Tensor
    seen: Tensor
    top: Tensor


def log_features(rows: Tensor, projection: Tensor) -> Tensor:
    """ω·x - |x|²/2 of x = rows / size^(1/4), for each row ω of `projection` [features, size]."""
    scaled: Tensor = rows * rows.shape[-1] ** -0.25
    return torch.matmul(scaled, projection.transpose(0, 1)) - scaled.square().sum(-1, keepdim=True) / 2


def query_features(logs: Tensor, epsilon: float) -> Tensor:
    """Features of queries, the largest of each query being 1."""
    return (logs - logs.amax(-1, keepdim=True)).exp() + epsilon


def causal_steps(query: Tensor, log_key: Tensor, value: Tensor, before: Memory | None) -> tuple[Steps, Tensor]:
    """The recurrence without its ε, and the largest log feature [batch, tokens, heads] up to every token.

    `query` are features; `log_key` is -inf where a token is padded.
    """
    top = log_key.amax(-1)
    start = torch.full_like(top[:, :1], -torch.inf)
    if before is not None:
        start = torch.where(before.seen[..., -1] > 0, before.top, -torch.inf)[:, None]
    running = torch.cat([start, top], dim=1).cummax(dim=1).values
    known = running[:, :-1] > -torch.inf
    running = torch.where(running > -torch.inf, running, 0)
    earlier, running = running[:, :-1], running[:, 1:]
    decay = torch.where(known, earlier - running, 0)
    return Steps(query, (log_key - running[..., None]).exp(), value, decay[..., None]), running


def causal_sums(
    parts: tuple[Tensor, Tensor, Tensor],
    before: Memory | None,
    *,
    plan: RecurrencePlan,
    chunk: int,
    epsilon: float,
) -> tuple[Tensor, Memory]:
    """Sums over earlier keys, and the memory after them, of features of queries, log features of keys, and values.

    As of `causal_steps`; `plan` chooses who computes.
    """
    query, log_key, value = parts
    steps, running = causal_steps(query, log_key, value, before)
    out, sums = plan.run(steps, None if before is None else before.sums, chunk)
    seen = value.cumsum(1) if before is None else value.cumsum(1) + before.seen[:, None]
    out = out + epsilon * query.sum(-1, keepdim=True) * seen
    return out, Memory(sums, seen[:, -1], running[:, -1])


def full_sums(query: Tensor, log_key: Tensor, value: Tensor, epsilon: float) -> Tensor:
    """Sums over all keys; `query` are features."""
    key = key_features(log_key, epsilon)
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    return torch.matmul(query, torch.matmul(key.transpose(-1, -2), value)).transpose(1, 2)


def key_features(log_key: Tensor, epsilon: float) -> Tensor:
    """Features of keys, the largest of all keys of a head being 1."""
    top = log_key.amax((1, 3), keepdim=True)
    return (log_key - torch.where(top > -torch.inf, top, 0)).exp() + epsilon


def pair_sums(query: Tensor, log_key: Tensor, value: Tensor, *, causal: bool, epsilon: float) -> Tensor:
    """The share of every key in the sums, before they are divided, [batch, heads, query, key]."""
    real = value[..., -1].transpose(1, 2)[:, :, None, :]
    if causal:
        steps, _ = causal_steps(query, log_key, value, None)
        extra = epsilon * query.sum(-1).transpose(1, 2)[..., None]
        return (effective_weights(steps) + extra.expand(-1, -1, -1, real.shape[-1]).tril()) * real
    return pairs(query, key_features(log_key, epsilon), causal=False) * real


def pairs(query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    """Products of features, [batch, heads, query, key], where causal those of later keys zero."""
    products = torch.matmul(query.transpose(1, 2), key.permute(0, 2, 3, 1))
    return products.tril() if causal else products


def shares(sums: Tensor) -> Tensor:
    """Sums [..., key] as shares that sum to one; zeros stay zeros."""
    total = sums.sum(-1, keepdim=True)
    return sums / torch.where(total > 0, total, 1)


def quotient(sums: Tensor) -> Tensor:
    """Sums [..., value_size + 1] of values by those of ones, [..., value_size]; 0 where nothing was seen."""
    ones = sums[..., -1:]
    return sums[..., :-1] / torch.where(ones > 0, ones, 1)
