"""What the queries of compressive memories see, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True, kw_only=True)
class MemorySizes:
    """What a query sees before its own segment of `segment` tokens: the last `memory` tokens, and before those
    `compressed` rows that stand for `rate` tokens each, which a convolution reads `dilation` tokens apart."""

    segment: int
    memory: int
    compressed: int
    rate: int
    dilation: int = 1

    @property
    def before(self) -> int:
        """Tokens before its own that a compressed row is made of: a dilated convolution reaches back."""
        return (self.rate - 1) * (self.dilation - 1)

    @property
    def window(self) -> int:
        """The most tokens seen as they are."""
        return self.memory + self.segment

    @property
    def ring(self) -> int:
        """Compressed rows to remember: those that are seen, and those whose tokens still are."""
        return self.compressed + self.window // self.rate

    def near(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether queries at positions `query` see tokens at `key`; broadcasts."""
        first = query // self.segment * self.segment - self.memory
        return (key >= first) & (key <= query)

    def far(self, query: Tensor, row: Tensor) -> Tensor:
        """Whether queries at positions `query` see compressed rows number `row`, negative if there is none."""
        end = (query // self.segment * self.segment - self.memory) // self.rate
        return (row >= 0) & (row < end) & (row >= end - self.compressed)
