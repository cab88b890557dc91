"""Attention to the tokens that the indexer selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

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
    if top == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    with torch.no_grad():
        scores = scores.masked_fill(~allowed, NEVER)
        least = scores.topk(top, dim=-1, sorted=False).values.amin(-1, keepdim=True)
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

    def at(self, part: slice) -> Tile:
        """Some of the queries."""
        return Tile(self.query[:, part], self.index[:, part], self.weights[:, part], self.positions[:, part])

    def pieces(self, length: int) -> Iterator[Tile]:
        """Split into tiles of at most `length` queries, in order."""
        for start in range(0, self.positions.shape[1], length):
            yield self.at(slice(start, start + length))


class Choice(NamedTuple):
    """The masks, bool, of the `tokens` that each query attends to, [batch, query, key], and of the index keys that
    were `chosen`, with the `scores` of all, both [batch, query, index key]."""

    tokens: Tensor
    chosen: Tensor
    scores: Tensor


def places_of(chosen: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The places of the true elements of `chosen` [batch, key], bool, at most `most` of each row, in order, [batch,
    most]; and whether there is one, of the same shape."""
    counts = chosen.cumsum(1)
    places = counts.new_zeros(len(chosen), most + 1)
    # Places that were not chosen go to an extra column behind the others, which is cut off.
    numbers = torch.arange(chosen.shape[1], device=chosen.device).expand_as(counts)
    places.scatter_(1, (counts - 1).where(chosen, most), numbers)
    return places[:, :most], torch.arange(most, device=chosen.device) < counts[:, -1:]


def taken(rows: Tensor, places: Tensor) -> Tensor:
    """The `rows` [batch, row, ...] at `places` [batch, n]."""
    if len(rows) == 1:
        return rows[0].index_select(0, places[0])[None]
    # One index for all would copy rows element by element.
    found = [one.index_select(0, at) for one, at in zip(rows, places, strict=True)]
    return torch.stack(found) if found else rows[:, : places.shape[1]]


@dataclass(frozen=True, eq=False)
class Memory:
    """Keys and values [batch, key, groups, size], keys in parts `keys` whose sizes add up to that of a query; `value`
    is None if values are the first part. Index keys `index` [batch, index key, index_size] with rotary positions, one
    for each key, at least float32; `positions` [batch or 1, key]; `key_padding_mask` [batch, key], or None if all keys
    are real.

    With `numbers` [1, key], int64, keys and values are rows [1, row, groups, size] of a cache, of which these belong to
    the keys in order."""

    keys: tuple[Tensor, ...]
    value: Tensor | None
    index: Tensor
    positions: Tensor
    key_padding_mask: Tensor | None
    numbers: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The values [batch, key, groups, size], at least float32."""
        return wide(self.keys[0] if self.value is None else self.value)

    def at(self, places: Tensor, real: Tensor | None) -> Memory:
        """The keys at `places` [batch, n], of which `real` [batch, n], or all if it is None, are; index keys stay."""
        rows = places if self.numbers is None else self.numbers.gather(1, places)
        keys = tuple(taken(part, rows) for part in self.keys)
        value = None if self.value is None else taken(self.value, rows)
        return dataclasses.replace(self, keys=keys, value=value, key_padding_mask=real, numbers=None)

    def until(self, keys: int) -> Memory:
        """The first keys."""
        kept = self.key_padding_mask
        return dataclasses.replace(
            self,
            keys=tuple(part[:, :keys] for part in self.keys),
            value=None if self.value is None else self.value[:, :keys],
            index=self.index[:, :keys],
            positions=self.positions[:, :keys],
            key_padding_mask=None if kept is None else kept[:, :keys],
        )

    def tokens(self, tile: Tile, mask: Mask, top: int) -> Tensor:
        """The keys that each query of a tile attends to, [batch, query, key], bool."""
        return self.seen(tile, mask) if self.chooses_all(top) else self.choose(tile, mask, top).tokens

    def chooses_all(self, top: int) -> bool:
        """Whether every query attends to all keys that it sees, so that no index score is needed."""
        return self.index.shape[1] <= top

    def scores(self, query: Tensor) -> Tensor:
        """The products [batch, groups, row, key] of queries [batch, groups, row, size] and keys."""
        parts = torch.split(query, [part.shape[-1] for part in self.keys], -1)
        products = [part @ wide(key).permute(0, 2, 3, 1) for part, key in zip(parts, self.keys, strict=True)]
        return products[0] if len(products) == 1 else torch.stack(products).sum(0)

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
    scores = torch.unflatten(memory.scores(query), 2, (each, queries)).flatten(1, 2)
    return shares(scores, chosen[:, None])


def masked(tile: Tile, memory: Memory, spec: AttentionSpec, top: int) -> Tensor:
    """Outputs [batch, query, heads, value_size], computed with all keys and a mask of the chosen ones."""
    chosen = memory.tokens(tile, spec.mask, top)
    return _summed(masked_weights(tile, memory, spec, chosen), memory, spec)


def masked_and_far(tile: Tile, memory: Memory, spec: AttentionSpec, top: int) -> tuple[Tensor, Tensor]:
    """The outputs of `masked`, and the divergence of the indexer from the attention, [batch, query]."""
    choice = memory.choose(tile, spec.mask, top)
    weights = masked_weights(tile, memory, spec, choice.tokens)
    far = divergence(choice.scores, memory.shares_of_index(weights.detach()), choice.chosen)
    return _summed(weights, memory, spec), far


def gathered(tile: Tile, memory: Memory, spec: AttentionSpec, top: int, most: int) -> Tensor:
    """Outputs [batch, 1, heads, value_size] of one query per sequence, which only reads the keys and values that were
    chosen, at most `most`."""
    places, real = places_of(memory.tokens(tile, spec.mask, top)[:, 0], most)
    near = memory.at(places, real)
    return _summed(masked_weights(tile, near, spec, real[:, None]), near, spec)


def _summed(weights: Tensor, memory: Memory, spec: AttentionSpec) -> Tensor:
    groups, queries = spec.heads.key_value, weights.shape[2]
    summed = torch.unflatten(weights, 1, (groups, -1)).flatten(2, 3) @ memory.values.transpose(1, 2)
    return torch.unflatten(summed, 2, (spec.heads.query // groups, queries)).flatten(1, 2).transpose(1, 2)


Read = TypeVar("Read")

PIECE = 1 << 21
"""The largest number of scores that are held at once, except in compiled code."""


class LearnsFromAttention(KeepsAuxiliaryLoss):
    """Base class, beside `nn.Module`, of modules with an indexer, which training passes align with the attention.

    `options.align` is the weight of its loss.
    """

    options: Any
    training: bool

    @property
    def learns(self) -> bool:
        """Whether a pass now trains the indexer, for which it computes the scores of all that may be chosen."""
        return self.training and self.options.align > 0 and torch.is_grad_enabled()

    def keep_divergence(self, far: Tensor, key_padding_mask: Tensor | None) -> None:
        """Keep the mean of the divergences `far` [batch, query] of real queries, times `align`, as auxiliary loss."""
        real = torch.ones_like(far) if key_padding_mask is None else key_padding_mask[:, -far.shape[1] :]
        self.keep_auxiliary_loss(self.options.align * (far * real).sum() / real.sum().clamp(min=1))


class SelectedTokens(LearnsFromAttention, InnerAttention, nn.Module):
    """Each query attends to the `top` tokens with the largest scores of `indexer`, the same in all heads.

    A training pass with gradients stores the loss of the indexer for `take_auxiliary_loss`.
    """

    computes_itself = True

    def __init__(self, spec: AttentionSpec, options: DsaConfig) -> None:
        super().__init__()
        self.spec = spec
        self.options = options
        self.indexer = Indexer(options)

    def remember(self, rows: Tensor, positions: Tensor) -> Fields:
        """The field "index": index keys [..., index_size] of hidden states [..., hidden_size]."""
        return {"index": self.indexer.remembered(rows, positions)}

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
        chosen = memory.tokens(tile, self.spec.mask, self.options.top)
        return masked_weights(tile, memory, self.spec, chosen)

    def read(self, tile: Tile, memory: Memory, spec: AttentionSpec) -> Tensor:
        """Outputs [batch, query, heads, value_size], at least float32, of attention under `spec` to the chosen tokens.

        A pass that trains the indexer keeps its `divergence`.
        """
        if not self.learns:
            if tile.positions.shape[1] == 1 and memory.positions.shape[1] > self.options.most:
                return gathered(tile, memory, spec, self.options.top, self.options.most)
            return torch.cat(self._in_pieces(masked, tile, memory, spec), dim=1)
        outputs, losses = zip(*self._in_pieces(masked_and_far, tile, memory, spec), strict=True)
        self.keep_divergence(torch.cat(losses, dim=1), memory.key_padding_mask)
        return torch.cat(outputs, dim=1)

    def _in_pieces(self, read: Callable[..., Read], tile: Tile, memory: Memory, spec: AttentionSpec) -> list[Read]:
        """The results of `read` for the tile, split into pieces so that at most `PIECE` scores are held at once.

        Each piece reads the keys until that of its last query only.
        """
        largest = max(self.options.index_heads, spec.heads.query) * len(tile.positions)
        (queries, keys), further = (part.positions.shape[1] for part in (tile, memory)), (spec, self.options.top)
        length = max(1, PIECE // max(1, largest * keys))
        if torch.compiler.is_compiling() or length >= queries:
            return [read(tile, memory, *further)]
        # Scores are not stored for the backward pass, which recomputes them piece by piece.
        run = partial(checkpoint, read, use_reentrant=False) if torch.is_grad_enabled() else read
        ends = range(keys - queries + length, keys + length, length)
        pieces = zip(tile.pieces(length), ends, strict=True)
        return [run(piece, memory.until(min(end, keys)), *further) for piece, end in pieces]

    def _tile(self, rows: Tensor, operands: AttentionInputs) -> Tile:
        places = positions(operands)[0].expand(rows.shape[0], -1)
        query = wide(operands.query) * self.spec.heads.key_size**-0.5
        return Tile(query, self.indexer.queries(rows, places), self.indexer.weights(rows), places)

    def _memory(self, operands: AttentionInputs) -> Memory:
        index, places = wide(operands.fields["index"]), positions(operands)[1]
        return Memory((wide(operands.key),), wide(operands.value), index, places, operands.key_padding_mask)
