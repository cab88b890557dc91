"""Relative positions: learned tables, indexed by distance, that are added to scores and outputs."""

from __future__ import annotations

import torch
from attn_core.modifiers import BiasTable, DependencyKeys, DependencyValues, Modifier, RelativeKeys, RelativeValues
from torch import Tensor

from attn_variants.compute.dependency import tree_distances
from attn_variants.compute.pairs import Pairs


def relative_bias(modifier: BiasTable, table: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The bias [batch or 1, heads, query, key] of a table [buckets, heads].

    `query` [batch or 1, 1, query, 1] and `key` [batch or 1, 1, 1, key] are absolute positions.
    """
    # Indexed with the heads first, so that the bias has the memory layout of the scores.
    return table.t().contiguous()[:, modifier.bucket((key - query)[:, 0])].transpose(0, 1)


def relative_keys(pairs: Pairs, modifier: RelativeKeys) -> Tensor:
    """q·a_{j-i} / √d_k, [batch, heads, query, key], from products with 2 clip + 1 vectors, not one per pair."""
    table = pairs.weights(f"modifiers.{modifier.kind}")["table"]
    products = torch.matmul(pairs.query * pairs.query.shape[-1] ** -0.5, table.transpose(-1, -2))
    rows = places_in_table(pairs, modifier, table).expand(*products.shape[:-1], -1)
    return products.gather(-1, rows)


def relative_values(pairs: Pairs, modifier: RelativeValues, weights: Tensor) -> Tensor:
    """Σ_j α_ij a_{j-i}, [batch, heads, query, value_size]; weights are summed by distance, then multiplied by a."""
    table = pairs.weights(f"modifiers.{modifier.kind}")["table"].to(weights.dtype)
    rows = places_in_table(pairs, modifier, table).expand(weights.shape)
    zeros = weights.new_zeros(*weights.shape[:-1], table.shape[-2])
    return torch.matmul(zeros.scatter_add(-1, rows, weights), table)


def places_in_table(pairs: Pairs, modifier: Modifier, table: Tensor) -> Tensor:
    """The row [batch or 1, 1, query, key] of a table [..., 2 clip + 1, size] for each distance, clipped.

    The distance is j - i, or the tree distance for the dependency modifiers.
    """
    clip = (table.shape[-2] - 1) // 2
    query, key = pairs.places
    if isinstance(modifier, (DependencyKeys, DependencyValues)):
        distance = tree_distances(modifier.tree, query, key)
    else:
        distance = key - query
    return distance.clamp(-clip, clip) + clip
