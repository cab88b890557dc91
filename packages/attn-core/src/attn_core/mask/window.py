"""Sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.errors import InvalidValue
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, of_keys, run


@dataclass(frozen=True, kw_only=True)
class Window(Mask):
    """A query sees `left` positions before and `right` after itself, every `dilation`-th one.

    Counts exclude the query's own position, which is always seen; `left=None` reaches back to the start.
    Longformer's window w (Beltagy et al. 2020) is left = right = w/2; Mistral's is left = w - 1, right = 0.
    """

    left: int | None
    right: int | None = 0
    dilation: int = 1
    kind = "window"

    def __post_init__(self) -> None:
        for field in ("left", "right"):
            count = getattr(self, field)
            if count is not None and count < 0:
                raise InvalidValue.of(f"window.{field}", count, "a whole number from 0, or None for no bound")
        if self.dilation < 1:
            raise InvalidValue.of("window.dilation", self.dilation, "a whole number from 1 (1 is dense)")

    def allows(self, query: Positions, key: Positions) -> Any:
        back = query - key
        seen = back % self.dilation == 0
        if self.left is not None:
            seen = seen & (back <= self.left * self.dilation)
        if self.right is not None:
            seen = seen & (-back <= self.right * self.dilation)
        return seen

    @property
    def lookback(self) -> int | None:
        return None if self.left is None else self.left * self.dilation

    @property
    def lookahead(self) -> int | None:
        return None if self.right is None else self.right * self.dilation

    @property
    def period(self) -> int:
        return self.dilation

    def runs(self, query: int, keys: int) -> Runs:
        first, last = self._steps(query, keys)
        start, stop = query + first * self.dilation, query + last * self.dilation + 1
        return run(start, stop) if self.dilation == 1 else of_keys(range(start, stop, self.dilation))

    def count(self, queries: int, keys: int) -> int:
        """Exact; linear in `queries`."""
        steps = (self._steps(row, keys) for row in range(keys - queries, keys))
        return sum(max(0, last - first + 1) for first, last in steps)

    def _steps(self, query: int, keys: int) -> tuple[int, int]:
        """Steps of the dilation from the query's own position to the first and the last key it sees."""
        first, last = -(query // self.dilation), (keys - 1 - query) // self.dilation
        first = first if self.left is None else max(first, -self.left)
        return first, last if self.right is None else min(last, self.right)
