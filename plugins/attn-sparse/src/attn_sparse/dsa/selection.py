"""Attention to the tokens that the indexer selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, Fields, InnerAttention, Mask
from attn_core.auxiliary_loss import KeepsAuxiliaryLoss
from attn_core.masking import positions, seen_pairs, shares, wide
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attn_sparse.dsa.indexer import Indexer, divergence, index_scores
from attn_sparse.dsa.options import DsaConfig

NEVER = float("-inf")


def choose(scores: Tensor, allowed: Tensor, top: int) -> Tensor:
    """A mask [batch, query, key], bool, of the `top` allowed keys with the largest scores, or of all if they are fewer.

    Of equal scores, which are common because ReLU gives 0, the last keys are chosen, so that the choice does not depend
    on how many tokens are computed at once. There must be at least `top` keys.
    """
    with torch.no_grad():
        scores = scores.masked_fill(~allowed, NEVER)
        least = scores.topk(top, dim=-1).values[..., -1:]
        better, equal = scores > least, scores == least
        places = top - better.sum(-1, keepdim=True)
        behind = equal.sum(-1, keepdim=True) - equal.cumsum(-1)
        return (better | equal & (behind < places)) & allowed


@dataclass(frozen=True, eq=False)
class Tile:
    """A tile of queries: `query` [batch, query, heads, size], scaled; index queries `index` [batch, query, index_heads,
    index_size] with `weights` [batch, query, index_heads]; `positions` [batch, query]. Floats are at least float32."""

    query: Tensor
    index: Tensor
    weights: Tensor
    positions: Tensor

    def pieces(self, length: int) -> Iterator[Tile]:
        """Split into tiles of at most `length` queries, in order."""
        for start in range(0, self.positions.shape[1], length):
            at = slice(start, start + length)
            yield Tile(self.query[:, at], self.index[:, at], self.weights[:, at], self.positions[:, at])


class Choice(NamedTuple):
    """The masks, bool, of the `tokens` that each query attends to, [batch, query, key], and of the index keys that
    were chosen, with the `scores` of all, both [batch, query, index key]."""

    tokens: Tensor
    index: Tensor
    scores: Tensor


@dataclass(frozen=True, eq=False)
class Memory:
    """Keys and values [batch, key, groups, size], index keys `index` [batch, index key, index_size] with rotary
    positions, one for each key, all at least float32; `positions` [batch or 1, key]; `key_padding_mask` [batch, key],
    or None if all keys are real."""

    key: Tensor
    value: Tensor
    index: Tensor
    positions: Tensor
    key_padding_mask: Tensor | None

    def choose(self, tile: Tile, mask: Mask, top: int) -> Choice:
        """The keys that each query of a tile attends to, at most `top`."""
        scores = index_scores(tile.index, tile.weights, self.index)
        chosen = choose(scores, self.seen(tile, mask), min(top, scores.shape[-1]))
        return Choice(chosen, chosen, scores)

    def seen(self, tile: Tile, mask: Mask) -> Tensor:
        """The real keys that a mask allows each query of a tile to see, [batch, query, key]."""
        return seen_pairs(mask, tile.positions, self.positions, self.key_padding_mask)[:, 0]

    def shares_of_index(self, weights: Tensor) -> Tensor:
        """Attention weights [batch, heads, query, key] as shares of index keys, [batch, heads, query, index key]."""
        return weights


def masked_weights(tile: Tile, memory: Memory, spec: AttentionSpec, chosen: Tensor) -> Tensor:
    """Attention weights [batch, heads, query, key], zero outside the mask `chosen` [batch, query, key]."""
    # The queries of a group's heads are rows of one product: its keys are not copied for every head.
    groups, queries = spec.heads.key_value, tile.query.shape[1]
    query = torch.unflatten(tile.query.transpose(1, 2), 1, (groups, -1)).flatten(2, 3)
    each = spec.heads.query // groups
    scores = torch.unflatten(query @ memory.key.permute(0, 2, 3, 1), 2, (each, queries)).flatten(1, 2)
    return shares(scores, chosen[:, None])


def masked(tile: Tile, memory: Memory, spec: AttentionSpec, top: int) -> Tensor:
    """Outputs [batch, query, heads, value_size], computed with all keys and a mask of the chosen ones."""
    chosen = memory.choose(tile, spec.mask, top).tokens
    return _summed(masked_weights(tile, memory, spec, chosen), memory, spec)


def masked_and_far(tile: Tile, memory: Memory, spec: AttentionSpec, top: int) -> tuple[Tensor, Tensor]:
    """The outputs of `masked`, and the divergence of the indexer from the attention, [batch, query]."""
    choice = memory.choose(tile, spec.mask, top)
    weights = masked_weights(tile, memory, spec, choice.tokens)
    far = divergence(choice.scores, memory.shares_of_index(weights.detach()), choice.index)
    return _summed(weights, memory, spec), far


def gathered(tile: Tile, memory: Memory, spec: AttentionSpec, top: int, most: int) -> Tensor:
    """Outputs [batch, 1, heads, value_size] of one query per sequence, which only reads the keys and values that were
    chosen, at most `most`."""
    chosen = memory.choose(tile, spec.mask, top).tokens
    found = chosen[:, 0].byte().topk(most, dim=-1)
    sequence = torch.arange(len(chosen), device=chosen.device)[:, None]
    key, value = memory.key[sequence, found.indices], memory.value[sequence, found.indices]
    near = Memory(key, value, memory.index, memory.positions, None)
    weights = masked_weights(tile, near, spec, found.values[:, None].bool())
    return _summed(weights, near, spec)


def _summed(weights: Tensor, memory: Memory, spec: AttentionSpec) -> Tensor:
    groups, queries = spec.heads.key_value, weights.shape[2]
    summed = torch.unflatten(weights, 1, (groups, -1)).flatten(2, 3) @ memory.value.transpose(1, 2)
    return torch.unflatten(summed, 2, (spec.heads.query // groups, queries)).flatten(1, 2).transpose(1, 2)


Read = TypeVar("Read")

PIECE = 1 << 21
"""The largest number of scores that are held at once, except in compiled code."""


class SelectedTokens(KeepsAuxiliaryLoss, InnerAttention, nn.Module):
    """Each query attends to the `top` tokens with the largest scores of `indexer`, the same in all heads.

    A training pass with gradients stores the loss of the indexer for `take_auxiliary_loss`.
    """

    computes_itself = True

    def __init__(self, spec: AttentionSpec, options: DsaConfig) -> None:
        super().__init__()
        self.spec = spec
        self.options = options
        self.indexer = Indexer(options)

    def remember(self, rows: Tensor) -> Fields:
        """The field "index": index keys [..., index_size] of hidden states [..., hidden_size]."""
        return {"index": self.indexer.keys(rows)}

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]; by `attend`, causal attention, if all tokens are chosen."""
        if not self.learns and operands.key.shape[1] <= self.options.top:
            return attend(operands)
        return self.read(self._tile(rows, operands), self._memory(operands), self.spec).to(rows.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Attention weights [batch, heads, query, key], zero for tokens that are not chosen."""
        if operands.key.shape[1] <= self.options.top:
            return attend(operands)
        tile, memory = self._tile(rows, operands), self._memory(operands)
        chosen = memory.choose(tile, self.spec.mask, self.options.top).tokens
        return masked_weights(tile, memory, self.spec, chosen)

    @property
    def learns(self) -> bool:
        """Whether a pass now trains the indexer, for which it computes the scores of all tokens."""
        return self.training and self.options.align > 0 and torch.is_grad_enabled()

    def read(self, tile: Tile, memory: Memory, spec: AttentionSpec) -> Tensor:
        """Outputs [batch, query, heads, value_size], at least float32, of attention under `spec` to the chosen tokens.

        A pass that trains the indexer keeps the mean `divergence` of real queries, times `align`, as auxiliary loss.
        """
        if not self.learns:
            if tile.positions.shape[1] == 1 and memory.key.shape[1] > self.options.most:
                return gathered(tile, memory, spec, self.options.top, self.options.most)
            return torch.cat(self._in_pieces(masked, tile, memory, spec), dim=1)
        outputs, losses = zip(*self._in_pieces(masked_and_far, tile, memory, spec), strict=True)
        loss = torch.cat(losses, dim=1)
        kept = memory.key_padding_mask
        real = torch.ones_like(loss) if kept is None else kept[:, -loss.shape[1] :]
        self.keep_auxiliary_loss(self.options.align * (loss * real).sum() / real.sum().clamp(min=1))
        return torch.cat(outputs, dim=1)

    def _in_pieces(self, read: Callable[..., Read], tile: Tile, memory: Memory, spec: AttentionSpec) -> list[Read]:
        """The results of `read` for the tile, split into pieces so that at most `PIECE` scores are held at once."""
        largest = max(self.options.index_heads, spec.heads.query)
        length = max(1, PIECE // max(1, largest * memory.key[:, :, 0, 0].numel()))
        further = memory, spec, self.options.top
        if torch.compiler.is_compiling() or length >= tile.positions.shape[1]:
            return [read(tile, *further)]
        if not torch.is_grad_enabled():
            return [read(piece, *further) for piece in tile.pieces(length)]
        # Scores are not stored for the backward pass, which recomputes them piece by piece.
        return [checkpoint(read, piece, *further, use_reentrant=False) for piece in tile.pieces(length)]

    def _tile(self, rows: Tensor, operands: AttentionInputs) -> Tile:
        places = positions(operands)[0].expand(rows.shape[0], -1)
        query = wide(operands.query) * self.spec.heads.key_size**-0.5
        return Tile(query, self.indexer.queries(rows, places), self.indexer.weights(rows), places)

    def _memory(self, operands: AttentionInputs) -> Memory:
        places = positions(operands)[1]
        index = self.indexer.turned_keys(operands.fields["index"], places)
        return Memory(wide(operands.key), wide(operands.value), index, places, operands.key_padding_mask)
