"""The strided pattern of the Sparse Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.mask import runs as algebra
from attn_core.mask.checks import at_least
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs
from attn_core.mask.window import Window


@dataclass(frozen=True)
class Earlier(Mask):
    """Every `stride`-th position before the `stride` last ones: what a column adds to the window beside it."""

    stride: int
    kind = "strided"

    def __post_init__(self) -> None:
        at_least("strided.stride", self.stride, 1)

    def allows(self, query: Positions, key: Positions) -> Any:
        back = query - key
        return (back > self.stride) & (back % self.stride == 0)

    @property
    def lookahead(self) -> int:
        return 0

    @property
    def period(self) -> int:
        return self.stride

    def runs(self, query: int, keys: int) -> Runs:
        return algebra.of_keys(range(query % self.stride, min(keys, query - self.stride), self.stride))


@dataclass(frozen=True)
class Strided(Mask):
    """Both patterns of strided attention in one (Child et al. 2019, arXiv 1904.10509, section 4.2), causal.

    `local` is A¹ = {max(0, i - l), ..., i}, `column` A² = {j <= i: (i - j) mod l = 0}, for the stride l. With l near √n
    every position is reached from every later one in two steps, and the pairs grow as n √n.
    """

    stride: int
    kind = "strided"

    def __post_init__(self) -> None:
        at_least("strided.stride", self.stride, 1)

    @property
    def local(self) -> Window:
        """A¹, the `stride` positions before a query and its own."""
        return Window(left=self.stride)

    @property
    def column(self) -> Window:
        """A², every `stride`-th position up to a query's own."""
        return Window(left=None, dilation=self.stride)

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.local.allows(query, key) | self.column.allows(query, key)

    @property
    def lookahead(self) -> int:
        return 0

    @property
    def split(self) -> tuple[Mask, ...]:
        return self.local, Earlier(self.stride)

    def runs(self, query: int, keys: int) -> Runs:
        return algebra.unite(self.local.runs(query, keys), self.column.runs(query, keys))
