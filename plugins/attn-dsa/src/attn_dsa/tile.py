"""Some queries, and all that they may meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tile:
    """Queries [batch, query, heads, size], scaled; index queries [batch, query, index_heads, index_size] and their
    weights [batch, query, index_heads]; positions [batch, query]. All at least float32."""

    query: Tensor
    index: Tensor
    weights: Tensor
    positions: Tensor

    def pieces(self, length: int) -> Iterator[Tile]:
        """Tiles of at most `length` queries, in order."""
        for start in range(0, self.positions.shape[1], length):
            at = slice(start, start + length)
            yield Tile(self.query[:, at], self.index[:, at], self.weights[:, at], self.positions[:, at])


@dataclass(frozen=True, eq=False)
class Memory:
    """Keys and values [batch, key, groups, size], index keys [batch, key, index_size], turned, at least float32;
    positions [batch or 1, key]; `key_padding_mask` [batch, key], or None where all keys are real."""

    key: Tensor
    value: Tensor
    index: Tensor
    positions: Tensor
    key_padding_mask: Tensor | None
