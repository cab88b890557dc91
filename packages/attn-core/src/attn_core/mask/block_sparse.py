"""Blocks of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attn_core.errors import InvalidValue
from attn_core.mask.checks import at_least
from attn_core.mask.graph import Graph
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, merged


@dataclass(frozen=True)
class BlockSparse(Mask):
    """Positions are cut into blocks of `block`; a query of block r sees the key blocks `rows[r]`, wholly."""

    block: int
    rows: tuple[tuple[int, ...], ...]
    kind = "blocks"

    def __post_init__(self) -> None:
        at_least("blocks.block", self.block, 1)
        for row, seen in enumerate(self.rows):
            if any(not 0 <= key < len(self.rows) for key in seen):
                raise InvalidValue.of(f"blocks.rows[{row}]", seen, f"blocks from 0 to {len(self.rows) - 1}")

    def allows(self, query: Positions, key: Positions) -> Any:
        return self._blocks.allows(query // self.block, key // self.block)

    @property
    def lookback(self) -> int:
        return (self._blocks.lookback + 1) * self.block - 1

    @property
    def lookahead(self) -> int:
        return (self._blocks.lookahead + 1) * self.block - 1

    def runs(self, query: int, keys: int) -> Runs:
        row = query // self.block
        seen = self.rows[row] if 0 <= row < len(self.rows) else ()
        pieces = ((key * self.block, min(keys, (key + 1) * self.block)) for key in sorted(seen))
        return merged(pieces)

    @cached_property
    def _blocks(self) -> Graph:
        return Graph(self.rows)
