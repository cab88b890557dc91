"""What of the keys before a query a decoder must keep: the latest ones, and some that are kept for good."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from attn_core.masks.ranges import Runs, intersect, size, unite

if TYPE_CHECKING:
    from attn_core.masks.base import Mask


LONGEST = 1 << 40
"""No context has as many tokens."""


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


@lru_cache(maxsize=256)
def pinned_positions(mask: Mask, count: int) -> tuple[int, ...]:
    """The first `count` keys that decoding by the mask pins, ascending; all of them where there are fewer.

    A mask that pins keys without end, such as the last of every block, does so within a context: here within one that
    is long enough.
    """
    found, keys = mask.reach(None), max(1, count)
    if found.window is None and mask.reach(keys).window is not None:
        found = mask.reach(keys)
        while found.count < count and keys < LONGEST:
            keys *= 2
            found = mask.reach(keys)
    return found.positions[:count]
