"""A mask is a value; whether a query may see a key, how many pairs are allowed and how far back a
cache must remember all follow from it.

Positions are absolute: query i of n, over S keys, stands at position S - n + i (bottom-right alignment).
Predicates use operators only, so they take integers and integer tensors alike; `mask_mod` turns them into what
FlexAttention takes.

Two kinds of mask must be told more before their predicate answers: one that depends on the number of keys (`by_length`)
by `over`, one that differs from head to head (`heads`) by `of_head`. Both give other masks back as they are, so whoever
computes attention says `mask.over(keys)` and, where `heads` is not None, asks each head's mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from attn_core.mask import runs as algebra
from attn_core.mask.runs import Runs

Positions = Any
"""Positions: an int, or an integer tensor that broadcasts with the other operand."""

UNBOUNDED = None


class Mask(ABC):
    """Which keys a query may see. Closed under `&`, `|` and `~`."""

    kind: ClassVar[str]

    @abstractmethod
    def allows(self, query: Positions, key: Positions) -> Any:
        """Whether the query at position `query` may see the key at `key`; True keeps. Broadcasts.

        Raises `InvalidValue` where the mask depends on the number of keys or on the head and was not told.
        """

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

    @property
    def heads(self) -> int | None:
        """For how many heads the mask says something of its own; None where it is the same for all."""
        return None

    @property
    def by_length(self) -> bool:
        """Whether the mask depends on the number of keys and was not told it yet."""
        return False

    @property
    def closed(self) -> bool:
        """Whether `runs` are known in closed form, so that asking for them is cheap however many keys there are."""
        return True

    @property
    def period(self) -> int:
        """Queries whose positions differ by a multiple of this see nearly the same keys; 1 where neighbours do."""
        return 1

    @property
    def split(self) -> tuple[Mask, ...]:
        """Masks that allow together what this one does, no pair twice, each with neighbours of its own `period`."""
        return (self,)

    def over(self, keys: Positions) -> Mask:
        """The mask over `keys` keys: an int, or a tensor that broadcasts with the positions."""
        return self

    def of_head(self, head: int) -> Mask:
        """The mask of query head `head`."""
        return self

    def keys_of(self, query: int, keys: int) -> range:
        """The smallest range of key positions, of `keys` in all, that holds every key `query` can see."""
        first = 0 if self.lookback is None else max(0, query - self.lookback)
        last = keys if self.lookahead is None else min(keys, query + self.lookahead + 1)
        return range(first, max(first, last))

    def runs(self, query: int, keys: int) -> Runs:
        """The keys, of `keys` in all, that the query at position `query` sees."""
        bound = self.over(keys)
        return algebra.of_keys(key for key in self.keys_of(query, keys) if bound.allows(query, key))

    def count(self, queries: int, keys: int) -> int:
        """Allowed pairs of `queries` queries aligned to the end of `keys` keys; exact.

        Where the mask differs by head, the sum over its heads.
        """
        bound = self.over(keys)
        return sum(algebra.size(bound.runs(row, keys)) for row in range(keys - queries, keys))

    def __and__(self, other: Mask) -> Mask:
        from attn_core.mask.composite import Both

        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        from attn_core.mask.composite import Either

        return Either(self, other)

    def __invert__(self) -> Mask:
        from attn_core.mask.composite import Not

        return Not(self)
