"""Weights around a place that the query names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attn_core.distributions import LocalGaussian
from torch import Tensor

from attn_variants.compute.pairs import Pairs
from attn_variants.distribution.softmax import softmax
from attn_variants.distribution.unbounded import visible


def local_gaussian(distribution: LocalGaussian, pairs: Pairs, scores: Tensor) -> Tensor:
    """Softmax within the window around the place that each query names, times the Gaussian; see `LocalGaussian`."""
    count = visible(scores, pairs.allowed)
    centre = count * torch.sigmoid(share(pairs.query, pairs.weights("distribution")))
    return around(distribution.radius, scores, pairs.allowed, centre, pairs.places[1])


def share(query: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """vᵀ tanh(W q) [batch, heads, query, 1] of queries [batch, heads, query, key_size]."""
    hidden = torch.tanh(torch.matmul(query, weights["weight"]))
    return torch.matmul(hidden, weights["vector"][..., None])


def around(radius: int, scores: Tensor, allowed: Tensor | None, centre: Tensor, places: Tensor) -> Tensor:
    """Weights of scores [batch, heads, query, key] around `centre` [batch, heads, query, 1].

    `places` [batch or 1, 1, 1, key] are the positions of the keys. Keys further than `radius` from the centre get none.
    """
    distance = places - centre
    near = distance.detach().abs() <= radius
    weights = softmax(scores, near if allowed is None else near & allowed)
    return weights * torch.exp(-(distance**2) / (2 * (radius / 2) ** 2))
