"""Contiguous masks: full, causal, sliding windows, chunks, prefixes and concatenated documents."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from attn_core.checks import keep_tuples, require_whole
from attn_core.errors import InvalidValue
from attn_core.masks.base import Both, Mask, Positions, pick, tighter, told, within
from attn_core.masks.ranges import Runs, merged, of_keys, run
from attn_core.masks.reach import Reach


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    kind = "full"
    relative = True

    def allows(self, query: Positions, key: Positions) -> Any:
        # Always true, also for negative query positions (more queries than keys); broadcasts both operands.
        return (query <= key) | (query > key)

    def runs(self, query: int, keys: int) -> Runs:
        return run(0, keys)

    def count(self, queries: int, keys: int) -> int:
        return queries * keys


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and all earlier positions (Vaswani et al. 2017, section 3.2.3)."""

    kind = "causal"
    relative = True

    def allows(self, query: Positions, key: Positions) -> Any:
        return key <= query

    @property
    def lookahead(self) -> int:
        return 0

    def runs(self, query: int, keys: int) -> Runs:
        return run(0, min(keys, query + 1))

    def count(self, queries: int, keys: int) -> int:
        visible = min(queries, keys)
        return visible * (2 * keys - visible + 1) // 2


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
    relative = True

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


@dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` positions are seen by every query (prefix language models, Raffel et al. 2020).

    As attention sinks (Xiao et al. 2023, arXiv 2309.17453): `Window(left=w) | Prefix(s) & Causal()`.
    """

    length: int
    kind = "prefix"

    def allows(self, query: Positions, key: Positions) -> Any:
        return (key < self.length) & ((query <= key) | (query > key))

    def reach(self, keys: int | None) -> Reach:
        return Reach.of(0, run(0, self.length if keys is None else min(keys, self.length)))

    def runs(self, query: int, keys: int) -> Runs:
        return run(0, min(self.length, keys))

    def count(self, queries: int, keys: int) -> int:
        return queries * max(0, min(self.length, keys))


@dataclass(frozen=True, kw_only=True)
class Chunked(Mask):
    """Positions are cut into chunks of `size`; a query sees its own chunk, `back` chunks before and `ahead` after it.

    With `Causal` and no other chunks it is Llama 4's chunked attention; with one chunk on either side it is block-local
    attention (Parmar et al. 2018, arXiv 1802.05751, in one dimension).
    """

    size: int
    back: int = 0
    ahead: int = 0
    kind = "chunked"

    def __post_init__(self) -> None:
        require_whole("chunked.size", self.size, ge=1)
        require_whole("chunked.back", self.back, ge=0)
        require_whole("chunked.ahead", self.ahead, ge=0)

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


@dataclass(frozen=True, kw_only=True)
class ChunkRing(Mask):
    """Like `Chunked`, but the chunks form a ring: the last chunk precedes the first.

    The local attention of the Reformer's code (Kitaev et al. 2020, arXiv 2001.04451). A chunk that is reached in both
    directions is seen once. The last chunk is that of the last of `length` keys (see `over`).
    """

    size: int
    back: int = 1
    ahead: int = 0
    length: Positions | None = None
    kind = "chunk_ring"

    def __post_init__(self) -> None:
        require_whole("chunk_ring.size", self.size, ge=1)
        require_whole("chunk_ring.back", self.back, ge=0)
        require_whole("chunk_ring.ahead", self.ahead, ge=0)

    @property
    def by_length(self) -> bool:
        return self.length is None

    def over(self, keys: Positions) -> ChunkRing:
        return self if self.length is not None else dataclasses.replace(self, length=keys)

    def allows(self, query: Positions, key: Positions) -> Any:
        chunks = self._chunks(told("chunk_ring.length", self.length))
        way = query // self.size - key // self.size
        return (way % chunks <= self.back) | (-way % chunks <= self.ahead)

    def runs(self, query: int, keys: int) -> Runs:
        chunks, own = self._chunks(keys if self.length is None else self.length), query // self.size
        near = {(own + step) % chunks for step in range(-self.back, self.ahead + 1)}
        return merged((place * self.size, min(keys, (place + 1) * self.size)) for place in sorted(near))

    def _chunks(self, length: Positions) -> Any:
        """The number of chunks, at least one."""
        chunks = (length + self.size - 1) // self.size
        return chunks + (chunks < 1) * 1


@dataclass(frozen=True)
class Segments(Mask):
    """Concatenated documents of these lengths; a token sees its own document only, and a token after them sees nothing.

    With `Causal`, packed documents give the same results as each alone, provided that positions restart in each.
    """

    lengths: tuple[int, ...]
    kind = "segments"

    def __post_init__(self) -> None:
        keep_tuples(self, "lengths")
        for length in self.lengths:
            require_whole("segments.lengths", length, ge=0)

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


class Band(NamedTuple):
    """The numbers of positions before and after itself that a query sees; None means no bound."""

    left: int | None
    right: int | None


def band_of(mask: Mask) -> Band | None:
    """The band that a mask is equal to; None for any other mask."""
    if isinstance(mask, Full):
        return Band(None, None)
    if isinstance(mask, Causal):
        return Band(None, 0)
    if isinstance(mask, Window) and mask.dilation == 1:
        return Band(mask.left, mask.right)
    if isinstance(mask, Both):
        one, other = band_of(mask.one), band_of(mask.other)
        if one is not None and other is not None:
            return _both(one, other)
    return None


class PackedBand(NamedTuple):
    """A band within each of the concatenated documents of these lengths."""

    band: Band
    lengths: tuple[int, ...]


def varlen_band_of(mask: Mask) -> PackedBand | None:
    """The band within documents that a mask is equal to; None for any other mask."""
    if isinstance(mask, Segments):
        return PackedBand(Band(None, None), mask.lengths)
    if isinstance(mask, Both):
        for one, other in (mask.parts, mask.parts[::-1]):
            band, varlen = band_of(one), varlen_band_of(other)
            if band is not None and varlen is not None:
                return varlen._replace(band=_both(band, varlen.band))
    return None


def _both(one: Band, other: Band) -> Band:
    return Band(tighter(one.left, other.left), tighter(one.right, other.right))
