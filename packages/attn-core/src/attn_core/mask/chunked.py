"""Chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.mask.checks import at_least
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, run


@dataclass(frozen=True, kw_only=True)
class Chunked(Mask):
    """Positions are cut into chunks of `size`; a query sees its own chunk, `back` before it and `ahead` after it.

    With `Causal` and no others it is Llama 4's chunked attention; with one on either side block-local attention
    (Parmar et al. 2018, arXiv 1802.05751, in one dimension).
    """

    size: int
    back: int = 0
    ahead: int = 0
    kind = "chunked"

    def __post_init__(self) -> None:
        at_least("chunked.size", self.size, 1)
        at_least("chunked.back", self.back, 0)
        at_least("chunked.ahead", self.ahead, 0)

    def allows(self, query: Positions, key: Positions) -> Any:
        chunks = query // self.size - key // self.size
        return (chunks <= self.back) & (-chunks <= self.ahead)

    @property
    def lookback(self) -> int:
        return self.size * (self.back + 1) - 1

    @property
    def lookahead(self) -> int:
        return self.size * (self.ahead + 1) - 1

    def runs(self, query: int, keys: int) -> Runs:
        own = query // self.size
        return run(max(0, (own - self.back) * self.size), min(keys, (own + self.ahead + 1) * self.size))
