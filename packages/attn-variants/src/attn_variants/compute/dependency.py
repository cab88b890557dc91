"""Distances of tokens in a dependency tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attn_core.errors import InvalidValue
from attn_core.graph_safety import device_cache
from attn_core.modifiers import DependencyTree
from torch import Tensor

from attn_variants.compute.constants import in_trace


@dataclass(frozen=True, eq=False)
class ParsedSentences(DependencyTree):
    """The trees of the sentences of one call: depths [batch, token], signed distances [batch, 1, token, token].

    They are data of the call, as a `TensorMask` is, and take the place of the tree of a spec.
    """

    sentence_depths: Tensor | None = None
    distances: Tensor | None = None

    @classmethod
    def of(cls, parses: Tensor, rows: Tensor, key_padding_mask: Tensor | None) -> ParsedSentences:
        """The trees of `parses` [batch, token], int64, the head of each token or -1 for the root, for rows
        [batch, token, width].

        Raises `InvalidValue` for another shape or dtype, and for a sentence whose heads are not tokens, have a cycle,
        or several roots among the tokens that `key_padding_mask` [batch, token] keeps.
        """
        if parses.shape != rows.shape[:2] or parses.dtype != torch.int64:
            given = f"{parses.dtype} {tuple(parses.shape)}"
            raise InvalidValue.of("parses", given, f"torch.int64 {tuple(rows.shape[:2])}, the head of each token")
        real = torch.ones_like(parses, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        depths, above = climbed(parses.masked_fill(~real, -1), real)
        places = torch.arange(parses.shape[1], device=parses.device)
        deep, other = depths[:, :, None], depths[:, None, :]
        aside = torch.where(places[:, None] < places, 1, -1) * (deep + other)
        found = torch.where(above | above.transpose(1, 2), deep - other, aside)
        return cls(sentence_depths=depths, distances=found[:, None])


def climbed(parses: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The depths [batch, token] and ancestors [batch, token, token], True if the second is the first or above it.

    Raises `InvalidValue` unless each sentence is a tree; see `ParsedSentences.of`.
    """
    tokens = parses.shape[1]
    if bool(((parses >= tokens) | (parses < -1)).any()):
        raise InvalidValue.of("parses", int(parses.abs().max()), f"tokens from 0 to {tokens - 1}, or -1 for the root")
    roots = ((parses < 0) & real).sum(1)
    if bool((roots > 1).any()):
        sentence = int(roots.argmax())
        raise InvalidValue.of(f"parses[{sentence}]", f"{int(roots[sentence])} roots", "one root, -1, for each sentence")
    above = torch.eye(tokens, dtype=torch.bool, device=parses.device).repeat(len(parses), 1, 1)
    depths, node = torch.zeros_like(parses), parses
    for _ in range(tokens):
        inside = node >= 0
        if not bool(inside.any()):
            break
        depths = depths + inside
        at = node.clamp(min=0)
        above = above | (torch.nn.functional.one_hot(at, tokens).bool() & inside[..., None])
        node = torch.where(inside, parses.gather(1, at), -1)
    if bool((node >= 0).any()):
        sentence, token = (node >= 0).nonzero()[0].tolist()
        raise InvalidValue.of(f"parses[{sentence}]", f"a cycle above token {token}", "a tree")
    return depths, above


def tree_distances(tree: DependencyTree, query: Tensor, key: Tensor) -> Tensor:
    """The signed distances of Wang et al. 2019 (arXiv 1909.00383), int64, for positions that broadcast.

    Positive if the key is an ancestor of the query, or if neither is above the other and the query comes first.
    """
    if isinstance(tree, ParsedSentences) and tree.distances is not None:
        return tree.distances
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
