"""Reading the chosen tokens: masked among all keys, or gathered."""

from __future__ import annotations

import torch
from attn_core import AttentionSpec, Mask
from attn_core.masking import of_query_heads, seen_pairs, shares
from torch import Tensor

from attn_dsa.alignment import divergence
from attn_dsa.choice import choose
from attn_dsa.indexer import index_scores
from attn_dsa.tile import Memory, Tile


def chosen_keys(tile: Tile, memory: Memory, mask: Mask, top: int) -> tuple[Tensor, Tensor]:
    """Which keys each query reads, bool [batch, query, key], and the index scores [batch, query, key]."""
    scores = index_scores(tile.index, tile.weights, memory.index)
    allowed = seen_pairs(mask, tile.positions, memory.positions, memory.key_padding_mask)[:, 0]
    return choose(scores, allowed, min(top, scores.shape[-1])), scores


def masked_weights(tile: Tile, memory: Memory, spec: AttentionSpec, chosen: Tensor) -> Tensor:
    """Weights [batch, heads, query, key], zero outside `chosen` [batch, query, key]."""
    key = of_query_heads(spec.heads, memory.key.transpose(1, 2))
    return shares(tile.query.transpose(1, 2) @ key.transpose(-1, -2), chosen[:, None])


def masked(tile: Tile, memory: Memory, spec: AttentionSpec, top: int) -> Tensor:
    """Outputs [batch, query, heads, value_size]."""
    chosen, _ = chosen_keys(tile, memory, spec.mask, top)
    return _summed(masked_weights(tile, memory, spec, chosen), memory, spec)


def masked_and_far(tile: Tile, memory: Memory, spec: AttentionSpec, top: int) -> tuple[Tensor, Tensor]:
    """As `masked`, and how far the indexer is from the attention, [batch, query]."""
    chosen, scores = chosen_keys(tile, memory, spec.mask, top)
    weights = masked_weights(tile, memory, spec, chosen)
    return _summed(weights, memory, spec), divergence(scores, weights, chosen)


def gathered(tile: Tile, memory: Memory, spec: AttentionSpec, top: int) -> Tensor:
    """Outputs [batch, 1, heads, value_size] of one query each, which touch no other keys and values than the chosen."""
    chosen, _ = chosen_keys(tile, memory, spec.mask, top)
    found = chosen[:, 0].byte().topk(top, dim=-1)
    sequence = torch.arange(len(chosen), device=chosen.device)[:, None]
    key, value = memory.key[sequence, found.indices], memory.value[sequence, found.indices]
    near = Memory(key, value, memory.index, memory.positions, None)
    weights = masked_weights(tile, near, spec, found.values[:, None].bool())
    return _summed(weights, near, spec)


def _summed(weights: Tensor, memory: Memory, spec: AttentionSpec) -> Tensor:
    return (weights @ of_query_heads(spec.heads, memory.value.transpose(1, 2))).transpose(1, 2)
