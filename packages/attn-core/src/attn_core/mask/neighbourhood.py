"""Neighbourhoods that are shifted at the edges, not cut."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from attn_core.mask.checks import at_least, told
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, of_keys, run


@dataclass(frozen=True, kw_only=True)
class Neighbourhood(Mask):
    """A query sees exactly `size` keys: those around it, or at an edge the nearest (Hassani et al. 2023, 2204.07143).

    The first key is clamp(i - ⌊size/2⌋, 0, n - size) in one dimension; of fewer than `size` keys all are seen. With a
    `dilation` d the same holds among the positions that differ from the query's by multiples of d. The mask depends on
    the number of keys `length`; see `over`.
    """

    size: int
    dilation: int = 1
    length: Positions | None = None
    kind = "neighbourhood"

    def __post_init__(self) -> None:
        at_least("neighbourhood.size", self.size, 1)
        at_least("neighbourhood.dilation", self.dilation, 1)

    def allows(self, query: Positions, key: Positions) -> Any:
        length = told("neighbourhood.length", self.length)
        step, residue = self.dilation, query % self.dilation
        own, other = query // step, key // step
        last = (length - residue + step - 1) // step - self.size  # where the last neighbourhood of the residue starts
        first = own - self.size // 2
        # key >= clamp(first, 0, last) and key < clamp(first, 0, last) + size, without a clamp.
        begun = (other >= first) | (other >= last)
        ended = (other >= self.size) & (other >= first + self.size)
        return (key % step == residue) & begun & (ended ^ True) & (query >= 0)

    @property
    def lookback(self) -> int:
        return (self.size - 1) * self.dilation

    @property
    def lookahead(self) -> int:
        return (self.size - 1) * self.dilation

    @property
    def by_length(self) -> bool:
        return self.length is None

    @property
    def period(self) -> int:
        return self.dilation

    def over(self, keys: Positions) -> Neighbourhood:
        return self if self.length is not None else dataclasses.replace(self, length=keys)

    def runs(self, query: int, keys: int) -> Runs:
        if query < 0:
            return []
        length, residue = keys if self.length is None else self.length, query % self.dilation
        last = (length - residue + self.dilation - 1) // self.dilation - self.size
        first = max(0, min(max(0, query // self.dilation - self.size // 2), last))
        start, stop = first * self.dilation + residue, min(keys, (first + self.size) * self.dilation)
        return run(start, stop) if self.dilation == 1 else of_keys(range(start, stop, self.dilation))
