"""Packed documents."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from attn_core.mask.checks import at_least
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, run
from attn_core.mask.table import pick, within


@dataclass(frozen=True)
class Segments(Mask):
    """Documents of these lengths laid end to end; a token sees its own document only, and what is behind them nothing.

    With `Causal`, packed documents are what they are alone, provided that positions start anew in each.
    """

    lengths: tuple[int, ...]
    kind = "segments"

    def __post_init__(self) -> None:
        for length in self.lengths:
            at_least("segments.lengths", length, 0)

    def allows(self, query: Positions, key: Positions) -> Any:
        own, query_inside = within(query, len(self._ids))
        other, key_inside = within(key, len(self._ids))
        if not self._ids:
            return query_inside & key_inside
        return (pick(self._ids, own) == pick(self._ids, other)) & query_inside & key_inside

    @property
    def lookback(self) -> int:
        return max(0, max(self.lengths, default=0) - 1)

    @property
    def lookahead(self) -> int:
        return self.lookback

    def runs(self, query: int, keys: int) -> Runs:
        if not 0 <= query < len(self._ids):
            return []
        segment = bisect_right(self._bounds, query)
        return run(self._bounds[segment] - self.lengths[segment], min(keys, self._bounds[segment]))

    @cached_property
    def _bounds(self) -> list[int]:
        """Where each segment ends."""
        return list(accumulate(self.lengths))

    @cached_property
    def _ids(self) -> tuple[int, ...]:
        """The segment of every position."""
        return tuple(segment for segment, length in enumerate(self.lengths) for _ in range(length))
