"""A mask is a value; whether a query may see a key, how many pairs are allowed and how far back a
cache must remember all follow from it.

Positions are absolute: query i of n, over S keys, stands at position S - n + i (bottom-right alignment).
Predicates use operators only, so they take integers and integer tensors alike, and are what
FlexAttention calls a `mask_mod` when wrapped as `lambda b, h, q, k: mask.allows(q, k)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core.errors import InvalidValue

Positions = Any
"""Positions: an int, or an integer tensor that broadcasts with the other operand."""

UNBOUNDED = None


class Mask(ABC):
    """Which keys a query may see. Closed under `&`, `|` and `~`."""

    kind: ClassVar[str]

    @abstractmethod
    def allows(self, query: Positions, key: Positions) -> Any:
        """Whether the query at position `query` may see the key at `key`; True keeps. Broadcasts."""

    @property
    def lookback(self) -> int | None:
        """How many positions before itself a query can see at most; None if there is no bound."""
        return UNBOUNDED

    @property
    def lookahead(self) -> int | None:
        """How many positions after itself a query can see at most; 0 is causal, None has no bound."""
        return UNBOUNDED

    @property
    def causal(self) -> bool:
        """Whether no query sees a later position."""
        return self.lookahead == 0

    def keys_of(self, query: int, keys: int) -> range:
        """The smallest range of key positions, of `keys` in all, that holds every key `query` can see."""
        first = 0 if self.lookback is None else max(0, query - self.lookback)
        last = keys if self.lookahead is None else min(keys, query + self.lookahead + 1)
        return range(first, max(first, last))

    def count(self, queries: int, keys: int) -> int:
        """Allowed pairs of `queries` queries aligned to the end of `keys` keys; exact."""
        offset = keys - queries
        rows = range(offset, keys)
        return sum(bool(self.allows(row, key)) for row in rows for key in self.keys_of(row, keys))

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Either(self, other)

    def __invert__(self) -> Mask:
        return Not(self)


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    kind = "full"

    def allows(self, query: Positions, key: Positions) -> Any:
        # Always true, also for the negative positions of queries that outnumber the keys; broadcasts both.
        return (query <= key) | (query > key)

    def count(self, queries: int, keys: int) -> int:
        return queries * keys


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and what came before (Vaswani et al. 2017, section 3.2.3)."""

    kind = "causal"

    def allows(self, query: Positions, key: Positions) -> Any:
        return key <= query

    @property
    def lookahead(self) -> int:
        return 0

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

    def count(self, queries: int, keys: int) -> int:
        """Exact; linear in `queries`."""
        pairs = 0
        for row in range(keys - queries, keys):
            # Steps of the dilation from the row's own position to the first and the last key.
            first, last = -(row // self.dilation), (keys - 1 - row) // self.dilation
            first = first if self.left is None else max(first, -self.left)
            last = last if self.right is None else min(last, self.right)
            pairs += max(0, last - first + 1)
        return pairs


@dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` positions are seen by every query (prefix language models, Raffel et al. 2020)."""

    length: int
    kind = "prefix"

    def allows(self, query: Positions, key: Positions) -> Any:
        return (key < self.length) & ((query <= key) | (query > key))


@dataclass(frozen=True)
class Predicate(Mask):
    """A mask given as a function of positions, FlexAttention's `mask_mod` without batch and head.

    `function(query, key)` must use operators that take integers and tensors alike. `back` and `ahead`
    state the bounds that the function keeps; without them nothing is assumed.
    """

    function: Callable[[Positions, Positions], Any]
    back: int | None = None
    ahead: int | None = None
    kind = "predicate"

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.function(query, key)

    @property
    def lookback(self) -> int | None:
        return self.back

    @property
    def lookahead(self) -> int | None:
        return self.ahead


def _tighter(one: int | None, other: int | None) -> int | None:
    return min((bound for bound in (one, other) if bound is not None), default=None)


def _looser(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


@dataclass(frozen=True)
class Both(Mask):
    """What both masks allow."""

    one: Mask
    other: Mask
    kind = "composite"

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.one.allows(query, key) & self.other.allows(query, key)

    @property
    def lookback(self) -> int | None:
        return _tighter(self.one.lookback, self.other.lookback)

    @property
    def lookahead(self) -> int | None:
        return _tighter(self.one.lookahead, self.other.lookahead)


@dataclass(frozen=True)
class Either(Mask):
    """What one of the masks, or both, allow."""

    one: Mask
    other: Mask
    kind = "composite"

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.one.allows(query, key) | self.other.allows(query, key)

    @property
    def lookback(self) -> int | None:
        return _looser(self.one.lookback, self.other.lookback)

    @property
    def lookahead(self) -> int | None:
        return _looser(self.one.lookahead, self.other.lookahead)


@dataclass(frozen=True)
class Not(Mask):
    """What the mask does not allow."""

    mask: Mask
    kind = "composite"

    def allows(self, query: Positions, key: Positions) -> Any:
        # `^ True` negates Python booleans and boolean tensors alike; `~True` would be -2.
        return self.mask.allows(query, key) ^ True
