"""Modifiers of scores and values, computed by their definitions."""

from __future__ import annotations

import math

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.modifiers import (
    Alibi,
    DependencyKeys,
    DependencyTree,
    DependencyValues,
    Modifier,
    RelativeBias,
    ScoreFunction,
    SoftCap,
    T5Bias,
)
from torch import Tensor

from attn_testing.oracle.pairing import distances, places, weights_of

TREES = ("dependency_keys", "dependency_values")
MODIFIERS = ("alibi", "soft_cap", "function", "t5_bias", "relative_bias", "relative_keys", "relative_values", *TREES)
VALUES = ("relative_values", "dependency_values")


def modified(spec: AttentionSpec, modifier: Modifier, energies: Tensor, operands: AttentionInputs) -> Tensor:
    """Scores [batch, heads, query, key] after one modifier."""
    heads, apart = spec.heads.query, distances(operands)[:, None]
    if isinstance(modifier, Alibi):
        slopes = torch.tensor(alibi_slopes(heads), dtype=energies.dtype, device=energies.device)
        return energies - slopes[:, None, None] * apart.abs()
    if isinstance(modifier, SoftCap):
        return modifier.cap * torch.tanh(energies / modifier.cap)
    if isinstance(modifier, ScoreFunction):
        query, key = places(operands)
        head = torch.arange(heads, device=energies.device)[:, None, None]
        learned = weights_of(operands, "modifiers.function")
        changed: Tensor = modifier.function(energies, head, query[:, None, :, None], key[:, None, None, :], **learned)
        return changed.to(energies.dtype)
    if isinstance(modifier, (T5Bias, RelativeBias)):
        table = weights_of(operands, f"modifiers.{modifier.kind}")["table"]
        places_in = [[bucket(modifier, int(d)) for d in row] for row in apart.reshape(-1, apart.shape[-1])]
        rows = torch.tensor(places_in, device=energies.device).view(apart[:, 0].shape)
        return energies + table[rows].permute(0, 3, 1, 2)
    if modifier.kind in {"relative_keys", "dependency_keys"}:
        vectors = table_rows(operands, modifier, energies)
        return energies + torch.einsum("bqhd,bhqkd->bhqk", operands.query, vectors) / math.sqrt(spec.heads.key_size)
    if modifier.kind in VALUES:
        return energies
    raise NotImplementedError(f"the oracle does not implement the modifier {modifier.kind!r}")


def value_additions(spec: AttentionSpec, weights: Tensor, operands: AttentionInputs) -> Tensor:
    """The terms that modifiers add to the output, [batch, query, heads, value_size] or 0.

    `weights` are the attention weights [batch, heads, query, key].
    """
    added = torch.zeros((), dtype=weights.dtype, device=weights.device)
    for modifier in spec.modifiers:
        if modifier.kind in VALUES:
            added = added + torch.einsum("bhqk,bhqkd->bqhd", weights, table_rows(operands, modifier, weights))
    return added


def table_rows(operands: AttentionInputs, modifier: Modifier, pairs: Tensor) -> Tensor:
    """The table's vector for every pair, [batch, heads, query, key, size]; `pairs` is [batch, heads, query, key]."""
    table = weights_of(operands, f"modifiers.{modifier.kind}")["table"]
    clip = (table.shape[1] - 1) // 2
    apart = distances(operands)
    if isinstance(modifier, (DependencyKeys, DependencyValues)):
        query, key = (rows.expand(len(apart), -1).tolist() for rows in places(operands))
        walked = [[[steps(modifier.tree, i, j) for j in own] for i in row] for row, own in zip(query, key, strict=True)]
        apart = torch.tensor(walked, device=apart.device).view(apart.shape)
    rows = table[:, apart.clamp(-clip, clip) + clip].transpose(0, 1)
    return rows.expand(*pairs.shape, -1)


def steps(tree: DependencyTree, query: int, key: int) -> int:
    """The signed distance of two tokens in a dependency tree, by their paths to the root (Wang et al. 2019)."""
    up, down = to_the_root(tree, query), to_the_root(tree, key)
    if key in up or query in down:
        return len(up) - len(down)
    return (len(up) + len(down) - 2) * (1 if query < key else -1)


def to_the_root(tree: DependencyTree, token: int) -> list[int]:
    """The path from a token to the root; beyond the parsed tokens, the head of each token is the previous one."""
    path = [token]
    while (head := tree.heads[path[-1]] if path[-1] < len(tree.heads) else path[-1] - 1) >= 0:
        path.append(head)
    return path


def bucket(modifier: T5Bias | RelativeBias, distance: int) -> int:
    """The index in the bias table for a distance j - i."""
    if isinstance(modifier, RelativeBias):
        return min(max(distance, -modifier.clip), modifier.clip) + modifier.clip
    side = modifier.buckets // 2 if modifier.bidirectional else modifier.buckets
    first = side if modifier.bidirectional and distance > 0 else 0
    away = abs(distance) if modifier.bidirectional else max(-distance, 0)
    exact = side // 2
    if away < exact:
        return first + away
    grown = math.log(away / exact) / math.log(modifier.max_distance / exact)
    return first + min(side - 1, exact + int(grown * (side - exact)))


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi slopes 2^(-8h/H) (Press et al. 2022).

    If H is no power of two: the slopes of the power of two below, then every other slope of the next power.
    """
    lower = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
    return first + [2 ** (-8 * h / (2 * lower)) for h in range(1, 2 * lower, 2)][: heads - lower]
