"""Which keys before a query a decoder must cache: a window of the latest ones, and some that are pinned for good."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.masks.ranges import Runs, intersect, size, unite


@dataclass(frozen=True)
class Reach:
    """The keys, up to a query's own, that it or a later query may see: the last `window`, its own included, and the
    `pinned` ranges, wherever the query is. If `window` is None, all keys may be seen, and none is pinned.

    It may contain keys that no query sees, but never lacks one that some query sees.
    """

    window: int | None = None
    pinned: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, window: int | None, pinned: Runs) -> Reach:
        """Build a reach from pinned keys given as runs, which are dropped if `window` is None."""
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
        """The reach of a mask that allows what either mask allows."""
        if self.window is None or other.window is None:
            return Reach()
        return Reach.of(max(self.window, other.window), unite(list(self.pinned), list(other.pinned)))

    def __and__(self, other: Reach) -> Reach:
        """The reach of a mask that allows what both masks allow.

        Beyond the narrower window, both masks only allow keys that the mask with that window pins.
        """
        if self.window is None or other.window is None:
            return other if self.window is None else self
        if self.window == other.window:
            return Reach.of(self.window, intersect(list(self.pinned), list(other.pinned)))
        return min(self, other, key=_window)


def _window(reach: Reach) -> int:
    return reach.window or 0
