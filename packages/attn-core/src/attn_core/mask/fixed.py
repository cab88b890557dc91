"""The fixed pattern of the Sparse Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.errors import InvalidValue
from attn_core.mask import runs as algebra
from attn_core.mask.causal import Causal
from attn_core.mask.checks import at_least
from attn_core.mask.chunked import Chunked
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, merged


@dataclass(frozen=True, kw_only=True)
class Summaries(Mask):
    """The last `cells` cells of every block, up to a query's own position: they carry what a block says to later ones.

    With a `shift` s, those s times `cells` before the last ones, so that every head can have its own.
    """

    block: int
    cells: int
    shift: int = 0
    kind = "fixed"

    def __post_init__(self) -> None:
        at_least("fixed.block", self.block, 1)
        at_least("fixed.summaries", self.cells, 1)
        at_least("fixed.shift", self.shift, 0)
        if self.first < 0:
            allowed = f"at most the block's {self.block} cells, shifts included"
            raise InvalidValue.of("fixed.summaries", self.cells * (self.shift + 1), allowed)

    @property
    def first(self) -> int:
        """The first summary cell of a block."""
        return self.block - self.cells * (self.shift + 1)

    def allows(self, query: Positions, key: Positions) -> Any:
        cell = key % self.block
        return (cell >= self.first) & (cell < self.first + self.cells) & (key <= query)

    @property
    def lookahead(self) -> int:
        return 0

    def runs(self, query: int, keys: int) -> Runs:
        stop = min(keys, query + 1)
        starts = range(self.first, max(stop, 0), self.block)
        return merged((start, min(stop, start + self.cells)) for start in starts)


@dataclass(frozen=True, kw_only=True)
class Fixed(Mask):
    """Both patterns of fixed attention in one (Child et al. 2019, arXiv 1904.10509, section 4.2), causal.

    `local` is A¹ = {j <= i: ⌊j/l⌋ = ⌊i/l⌋}, `column` A² = {j <= i: j mod l >= l - c}, for blocks of l and c summaries.
    """

    block: int
    summaries: int
    kind = "fixed"

    def __post_init__(self) -> None:
        self.column  # noqa: B018 -- checks both numbers

    @property
    def local(self) -> Mask:
        """A¹, a query's own block up to its position."""
        return Chunked(size=self.block) & Causal()

    @property
    def column(self) -> Summaries:
        """A², the summary cells up to a query's position."""
        return Summaries(block=self.block, cells=self.summaries)

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.local.allows(query, key) | self.column.allows(query, key)

    @property
    def lookahead(self) -> int:
        return 0

    def runs(self, query: int, keys: int) -> Runs:
        return algebra.unite(self.local.runs(query, keys), self.column.runs(query, keys))
