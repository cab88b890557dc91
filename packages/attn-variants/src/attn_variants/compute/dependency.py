"""Distances of tokens in a dependency tree."""

from __future__ import annotations

import torch
from attn_core.graph_safety import device_cache
from attn_core.modifiers import DependencyTree
from torch import Tensor

from attn_variants.compute.constants import in_trace


def tree_distances(tree: DependencyTree, query: Tensor, key: Tensor) -> Tensor:
    """The signed distances of Wang et al. 2019 (arXiv 1909.00383), int64, for positions that broadcast.

    Positive if the key is an ancestor of the query, or if neither is above the other and the query comes first.
    """
    tokens = max(1, len(tree.heads))
    depths, above = _parts(tree, query.device)
    deep_query, deep_key = (depth_of(places, depths) for places in (query, key))
    parsed_query, parsed_key = (places.clamp(0, tokens - 1) for places in (query, key))
    # Tokens after the parse continue the tree as a chain below the last parsed token.
    up = above[parsed_query, parsed_key] & ((key < tokens) | (key <= query))
    down = above[parsed_key, parsed_query] & ((query < tokens) | (query <= key))
    aside = torch.where(query < key, 1, -1) * (deep_query + deep_key)
    return torch.where(up | down, deep_query - deep_key, aside)


def depths_of(tree: DependencyTree, device: torch.device) -> Tensor:
    """The depths [tokens] of the tokens of a parse; one entry for an empty parse."""
    return _parts(tree, device)[0]


def made(tree: DependencyTree, device: torch.device) -> tuple[Tensor, Tensor]:
    """The depths [tokens] of a parse, and bool [token, token], True if the second is the first or an ancestor of it."""
    depths, above = tree.depths or (0,), tree.ancestors or ((True,),)
    return torch.tensor(depths, device=device), torch.tensor(above, device=device)


def _parts(tree: DependencyTree, device: torch.device) -> tuple[Tensor, Tensor]:
    return made(tree, device) if in_trace() else _kept(tree, device)


@device_cache(32)
def _kept(tree: DependencyTree, device: torch.device) -> tuple[Tensor, Tensor]:
    return made(tree, device)


def depth_of(places: Tensor, depths: Tensor) -> Tensor:
    """The number of steps to the root from positions of any shape; `depths` [tokens] are those of the parse."""
    last = depths.shape[0] - 1
    return depths[places.clamp(0, last)] + (places - last).clamp(min=0)
