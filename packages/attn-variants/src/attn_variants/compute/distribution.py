"""Dispatch of the distributions, which turn scores into weights over the allowed keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attn_core.distributions import Entmax, LocalGaussian
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_variants.compute.pairs import Pairs
from attn_variants.distributions import (
    entmax,
    entmax15,
    hard,
    local_gaussian,
    sigmoid,
    softmax,
    softmax_with_sink,
    sparsemax,
    stick_breaking,
)

LEAST_ALPHA = 1.01
EXACT_ALPHA = 1.5


def distribute(pairs: Pairs, scores: Tensor) -> Tensor:
    """Turn scores [batch, heads, query, key] into weights over the allowed keys; rows without one give zeros."""
    kind = pairs.spec.distribution.kind
    if kind in ALONE:
        return ALONE[kind](scores, pairs.allowed)
    if kind not in WITH_PARTS:
        raise InvalidValue.of("distribution", kind, ", ".join([*ALONE, *WITH_PARTS]))
    return WITH_PARTS[kind](pairs, scores)


def entmax_of(pairs: Pairs, scores: Tensor) -> Tensor:
    """α-entmax with the α of the spec; for α = 1.5 the threshold is found exactly, by sorting."""
    distribution = pairs.spec.distribution
    alpha = distribution.alpha if isinstance(distribution, Entmax) else EXACT_ALPHA
    if alpha == EXACT_ALPHA:
        return entmax15(scores, pairs.allowed)
    return entmax(scores, pairs.allowed, alpha - 1)


def adaptive_entmax(pairs: Pairs, scores: Tensor) -> Tensor:
    """α-entmax with the learned α of each head."""
    excess = torch.sigmoid(pairs.weights("distribution")["shape"]).clamp(min=LEAST_ALPHA - 1)
    return entmax(scores, pairs.allowed, excess[:, None, None])


def with_sink(pairs: Pairs, scores: Tensor) -> Tensor:
    """Softmax with the learned logit of each head in its denominator."""
    return softmax_with_sink(scores, pairs.allowed, pairs.weights("distribution")["logit"][:, None, None])


def softmax_one(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """exp(e) / (1 + Σ exp(e)) over the last axis."""
    return softmax_with_sink(scores, allowed, scores.new_zeros(()))


def local(pairs: Pairs, scores: Tensor) -> Tensor:
    """Local-p attention of Luong et al. 2015; see `LocalGaussian`."""
    distribution = pairs.spec.distribution
    if not isinstance(distribution, LocalGaussian):
        raise InvalidValue.of("distribution", type(distribution).__name__, "LocalGaussian")
    return local_gaussian(distribution, pairs, scores)


ALONE: Mapping[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "softmax": softmax,
    "softmax_one": softmax_one,
    "sigmoid": sigmoid,
    "sparsemax": sparsemax,
    "hard": hard,
}
WITH_PARTS: Mapping[str, Callable[[Pairs, Tensor], Tensor]] = {
    "entmax": entmax_of,
    "adaptive_entmax": adaptive_entmax,
    "sink": with_sink,
    "local_gaussian": local,
    "stick_breaking": stick_breaking,
}


def softmax_over(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax over the last axis; zeros, and no gradient, in rows where nothing is allowed.

    `allowed` is bool, broadcasts with the scores and is True for scores to keep.
    """
    if allowed is None:
        return torch.softmax(scores, dim=-1)
    lowest = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(~allowed, lowest), dim=-1).masked_fill(~allowed, 0.0)
