"""Which tokens and compressed rows the queries of compressive memories see, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True, kw_only=True)
class MemorySizes:
    """The sizes of a query's past: its segment of `segment` tokens, `memory` tokens before it, and before these
    `compressed` rows of `rate` tokens each, which a convolution reads `dilation` tokens apart."""

    segment: int
    memory: int
    compressed: int
    rate: int
    dilation: int = 1

    @property
    def before(self) -> int:
        """The number of tokens before its own that a compressed row is computed from, by a dilated convolution."""
        return (self.rate - 1) * (self.dilation - 1)

    @property
    def window(self) -> int:
        """The largest number of uncompressed tokens that a query sees."""
        return self.memory + self.segment

    @property
    def ring(self) -> int:
        """The number of compressed rows to store: those that are seen, and those of tokens still seen uncompressed."""
        return self.compressed + self.window // self.rate

    def near(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether queries at positions `query` see tokens at positions `key`, which broadcast."""
        first = query // self.segment * self.segment - self.memory
        return (key >= first) & (key <= query)

    def far(self, query: Tensor, row: Tensor) -> Tensor:
        """Whether queries at positions `query` see the compressed rows with indices `row`, negative for no row."""
        end = (query // self.segment * self.segment - self.memory) // self.rate
        return (row >= 0) & (row < end) & (row >= end - self.compressed)
