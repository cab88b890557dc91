"""Chunks that stand in a ring."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from attn_core.mask.checks import at_least, told
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, merged


@dataclass(frozen=True, kw_only=True)
class ChunkRing(Mask):
    """As `Chunked`, but before the first chunk stands the last, and behind the last the first.

    The local attention of the Reformer's code (Kitaev et al. 2020, arXiv 2001.04451). A chunk that is met on both ways
    round is seen once. The last chunk is that of the last of `length` keys (see `over`).
    """

    size: int
    back: int = 1
    ahead: int = 0
    length: Positions | None = None
    kind = "chunk_ring"

    def __post_init__(self) -> None:
        at_least("chunk_ring.size", self.size, 1)
        at_least("chunk_ring.back", self.back, 0)
        at_least("chunk_ring.ahead", self.ahead, 0)

    @property
    def by_length(self) -> bool:
        return self.length is None

    def over(self, keys: Positions) -> ChunkRing:
        return self if self.length is not None else dataclasses.replace(self, length=keys)

    def allows(self, query: Positions, key: Positions) -> Any:
        chunks = self._chunks(told("chunk_ring.length", self.length))
        way = query // self.size - key // self.size
        return (way % chunks <= self.back) | (-way % chunks <= self.ahead)

    def runs(self, query: int, keys: int) -> Runs:
        chunks, own = self._chunks(keys if self.length is None else self.length), query // self.size
        near = {(own + step) % chunks for step in range(-self.back, self.ahead + 1)}
        return merged((place * self.size, min(keys, (place + 1) * self.size)) for place in sorted(near))

    def _chunks(self, length: Positions) -> Any:
        """How many chunks there are, at least one."""
        chunks = (length + self.size - 1) // self.size
        return chunks + (chunks < 1) * 1
