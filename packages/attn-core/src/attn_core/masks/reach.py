"""What of the keys before a query a decoder must keep: the latest ones, and some that are kept for good."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.masks.ranges import Runs, intersect, size, unite


@dataclass(frozen=True)
class Reach:
    """Of keys up to a query's own, those that it or a later query may see: the last `window`, its own included, and
    the `pinned` ones, wherever the query stands. Without a `window`, None, all keys may be seen, and none is pinned.

    It may hold keys that no query sees, and never lacks one that some query does.
    """

    window: int | None = None
    pinned: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, window: int | None, pinned: Runs) -> Reach:
        """With pinned keys as runs; none where there is no window."""
        return cls(window, () if window is None else tuple(pinned))

    @property
    def count(self) -> int:
        """Number of pinned keys."""
        return size(list(self.pinned))

    @property
    def positions(self) -> tuple[int, ...]:
        """The pinned keys, ascending."""
        return tuple(key for start, stop in self.pinned for key in range(start, stop))

    def __or__(self, other: Reach) -> Reach:
        """Of a mask that allows what either does."""
        if self.window is None or other.window is None:
            return Reach()
        return Reach.of(max(self.window, other.window), unite(list(self.pinned), list(other.pinned)))

    def __and__(self, other: Reach) -> Reach:
        """Of a mask that allows what both do.

        What the narrower window leaves out, and the other mask shows, is pinned by the narrower mask.
        """
        if self.window is None or other.window is None:
            return other if self.window is None else self
        if self.window == other.window:
            return Reach.of(self.window, intersect(list(self.pinned), list(other.pinned)))
        return min(self, other, key=_window)


def _window(reach: Reach) -> int:
    return reach.window or 0
