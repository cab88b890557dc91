"""Masks as values: a predicate on positions, and the bounds and counts that follow from it.

Positions are absolute integers. Query i of n queries over S keys has position S - n + i (bottom-right alignment).
Predicates use operators only, so that they take ints and integer tensors alike.

Two kinds of mask need more before their predicate can be evaluated: `mask.over(keys)` binds a mask that depends on the
number of keys (`by_length`), `mask.of_head(head)` selects the mask of one head where heads differ (`heads` is not
None). Both return other masks unchanged, so callers can apply them always."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any, ClassVar, Self

from attn_core.checks import keep_tuples, require_no_module
from attn_core.display import mask_card
from attn_core.errors import InvalidValue
from attn_core.masks.ranges import Runs, complement, intersect, of_keys, size, unite
from attn_core.masks.reach import Reach

Positions = Any
"""Positions: an int, or an integer tensor that broadcasts with the other operand."""

UNBOUNDED = None


class Mask(ABC):
    """Which keys a query may see. Closed under `&`, `|` and `~`."""

    kind: ClassVar[str]

    @abstractmethod
    def allows(self, query: Positions, key: Positions) -> Any:
        """Whether the query at position `query` may see the key at `key`; True keeps. Broadcasts.

        Raises `InvalidValue` for a mask that depends on the number of keys or on the head and is bound to none.
        """

    @property
    def lookback(self) -> int | None:
        """How many positions before itself a query can see at most; None if there is no bound."""
        return UNBOUNDED

    @property
    def lookahead(self) -> int | None:
        """How many positions after itself a query can see at most; 0 is causal, None has no bound."""
        return UNBOUNDED

    def reach(self, keys: int | None) -> Reach:
        """The keys, up to a query's own, that a decoder must cache in a context of `keys` tokens; None is an unbounded
        context."""
        return Reach(None if self.lookback is None else self.lookback + 1)

    @property
    def causal(self) -> bool:
        """Whether no query sees a later position."""
        return self.lookahead == 0

    @property
    def heads(self) -> int | None:
        """The number of heads, for a mask that differs by head; None where it is the same for all heads."""
        return None

    @property
    def by_length(self) -> bool:
        """Whether the mask depends on the number of keys and is not bound to one yet (see `over`)."""
        return False

    @property
    def relative(self) -> bool:
        """Whether only the distance between query and key matters, not where the sequence begins or ends."""
        return False

    @property
    def closed(self) -> bool:
        """Whether `runs` has a closed form, so that it is cheap for any number of keys."""
        return True

    @property
    def period(self) -> int:
        """Queries whose positions differ by a multiple of this see nearly the same keys; 1 where neighbours do."""
        return 1

    @property
    def split(self) -> tuple[Mask, ...]:
        """Masks that together allow the same pairs as this one, no pair twice, each with its own `period`."""
        return (self,)

    def over(self, keys: Positions) -> Mask:
        """The mask bound to `keys` keys: an int, or a tensor that broadcasts with the positions."""
        return self

    def of_head(self, head: int) -> Mask:
        """The mask of query head `head`."""
        return self

    def keys_of(self, query: int, keys: int) -> range:
        """The range of key positions, of `keys` in all, that `lookback` and `lookahead` let the query see."""
        first = 0 if self.lookback is None else max(0, query - self.lookback)
        last = keys if self.lookahead is None else min(keys, query + self.lookahead + 1)
        return range(first, max(first, last))

    def runs(self, query: int, keys: int) -> Runs:
        """The keys, of `keys` in all, that the query at position `query` sees, as sorted ranges."""
        bound = self.over(keys)
        return of_keys(key for key in self.keys_of(query, keys) if bound.allows(query, key))

    def count(self, queries: int, keys: int) -> int:
        """The exact number of allowed pairs of `queries` queries aligned to the end of `keys` keys.

        Where the mask differs by head, the sum over its heads.
        """
        bound = self.over(keys)
        return sum(size(bound.runs(row, keys)) for row in range(keys - queries, keys))

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Either(self, other)

    def __invert__(self) -> Mask:
        return Not(self)

    def _repr_html_(self) -> str:
        return mask_card(self)


@dataclass(frozen=True)
class Pair(Mask):
    """Base class of masks that combine two masks; `over` and `of_head` are applied to each of them.

    Raises `InvalidValue` where both masks differ by head, for different numbers of heads.
    """

    one: Mask
    other: Mask
    kind = "composite"

    def __post_init__(self) -> None:
        numbers = {part.heads for part in self.parts} - {None}
        if len(numbers) > 1:
            raise InvalidValue.of("mask.heads", sorted(map(str, numbers)), "the same number of heads in all its parts")

    @property
    def parts(self) -> tuple[Mask, Mask]:
        """Both masks."""
        return self.one, self.other

    @property
    def heads(self) -> int | None:
        return self.one.heads or self.other.heads

    @property
    def relative(self) -> bool:
        return self.one.relative and self.other.relative

    @property
    def by_length(self) -> bool:
        return self.one.by_length or self.other.by_length

    @property
    def closed(self) -> bool:
        return self.one.closed and self.other.closed

    def over(self, keys: Positions) -> Self:
        if not self.by_length:
            return self
        return dataclasses.replace(self, one=self.one.over(keys), other=self.other.over(keys))

    def of_head(self, head: int) -> Self:
        if self.heads is None:
            return self
        return dataclasses.replace(self, one=self.one.of_head(head), other=self.other.of_head(head))

    def count(self, queries: int, keys: int) -> int:
        if self.heads is None:
            return super().count(queries, keys)
        return sum(self.of_head(head).count(queries, keys) for head in range(self.heads))


@dataclass(frozen=True, repr=False)
class Both(Pair):
    """Allows the pairs that both masks allow."""

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Either) else repr(part) for part in self.parts)

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.one.allows(query, key) & self.other.allows(query, key)

    @property
    def lookback(self) -> int | None:
        return tighter(self.one.lookback, self.other.lookback)

    @property
    def lookahead(self) -> int | None:
        return tighter(self.one.lookahead, self.other.lookahead)

    def reach(self, keys: int | None) -> Reach:
        return self.one.reach(keys) & self.other.reach(keys)

    @property
    def period(self) -> int:
        return max(self.one.period, self.other.period)

    @property
    def split(self) -> tuple[Mask, ...]:
        return tuple(Both(one, other) for one in self.one.split for other in self.other.split)

    def runs(self, query: int, keys: int) -> Runs:
        return intersect(self.one.runs(query, keys), self.other.runs(query, keys))


@dataclass(frozen=True, repr=False)
class Either(Pair):
    """Allows the pairs that at least one of the masks allows."""

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.one.allows(query, key) | self.other.allows(query, key)

    @property
    def lookback(self) -> int | None:
        return _looser(self.one.lookback, self.other.lookback)

    @property
    def lookahead(self) -> int | None:
        return _looser(self.one.lookahead, self.other.lookahead)

    def reach(self, keys: int | None) -> Reach:
        return self.one.reach(keys) | self.other.reach(keys)

    @property
    def period(self) -> int:
        return self.one.period if self.one.period == self.other.period else 1

    def runs(self, query: int, keys: int) -> Runs:
        return unite(self.one.runs(query, keys), self.other.runs(query, keys))


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Allows the pairs that the mask does not allow."""

    mask: Mask
    kind = "composite"

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, Pair) else f"~{self.mask!r}"

    def allows(self, query: Positions, key: Positions) -> Any:
        # `^ True` negates Python booleans and boolean tensors alike; `~True` would be -2.
        return self.mask.allows(query, key) ^ True

    @property
    def relative(self) -> bool:
        return self.mask.relative

    @property
    def heads(self) -> int | None:
        return self.mask.heads

    @property
    def by_length(self) -> bool:
        return self.mask.by_length

    @property
    def closed(self) -> bool:
        return self.mask.closed

    def over(self, keys: Positions) -> Not:
        return Not(self.mask.over(keys)) if self.by_length else self

    def of_head(self, head: int) -> Not:
        return self if self.heads is None else Not(self.mask.of_head(head))

    def runs(self, query: int, keys: int) -> Runs:
        return complement(self.mask.runs(query, keys), keys)

    def count(self, queries: int, keys: int) -> int:
        return queries * keys * (self.heads or 1) - self.mask.count(queries, keys)


def tighter(one: int | None, other: int | None) -> int | None:
    """The smaller of two bounds; None means no bound."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _looser(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


@dataclass(frozen=True)
class PerHead(Mask):
    """A mask for each head: `masks[h]` is that of query head h.

    It has no predicate of its own: kernels get the mask of each head by `of_head`.
    """

    masks: tuple[Mask, ...]
    kind = "per_head"

    def __post_init__(self) -> None:
        keep_tuples(self, "masks")
        if not self.masks or any(mask.heads is not None for mask in self.masks):
            allowed = "at least one mask, none of which differs by head itself"
            raise InvalidValue.of("per_head.masks", self.masks, allowed)

    def allows(self, query: Positions, key: Positions) -> Any:
        raise InvalidValue.of("per_head.head", None, "the index of a head, set by mask.of_head(head)")

    @property
    def heads(self) -> int:
        return len(self.masks)

    @property
    def relative(self) -> bool:
        return all(mask.relative for mask in self.masks)

    @property
    def by_length(self) -> bool:
        return any(mask.by_length for mask in self.masks)

    @property
    def closed(self) -> bool:
        return all(mask.closed for mask in self.masks)

    @property
    def lookback(self) -> int | None:
        return widest([mask.lookback for mask in self.masks])

    @property
    def lookahead(self) -> int | None:
        return widest([mask.lookahead for mask in self.masks])

    def reach(self, keys: int | None) -> Reach:
        return reduce(or_, (mask.reach(keys) for mask in self.masks))

    def over(self, keys: Positions) -> PerHead:
        return PerHead(tuple(mask.over(keys) for mask in self.masks)) if self.by_length else self

    def of_head(self, head: int) -> Mask:
        if not 0 <= head < len(self.masks):
            raise InvalidValue.of("head", head, f"a head from 0 to {len(self.masks) - 1}")
        return self.masks[head]

    def count(self, queries: int, keys: int) -> int:
        return sum(mask.count(queries, keys) for mask in self.masks)


def widest(bounds: list[int | None]) -> int | None:
    """The largest of some bounds; None, no bound, where one of them is None."""
    known = [bound for bound in bounds if bound is not None]
    return max(known) if len(known) == len(bounds) else None


@dataclass(frozen=True)
class Predicate(Mask):
    """A mask given as a function of positions: FlexAttention's `mask_mod` without batch and head.

    `function(query, key)` must use operators that take integers and tensors alike. `back` and `ahead` are the bounds
    `lookback` and `lookahead` that the function respects; None means no known bound.
    """

    function: Callable[[Positions, Positions], Any]
    back: int | None = None
    ahead: int | None = None
    kind = "predicate"

    def __post_init__(self) -> None:
        require_no_module("predicate.function", self.function)

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.function(query, key)

    @property
    def lookback(self) -> int | None:
        return self.back

    @property
    def lookahead(self) -> int | None:
        return self.ahead

    @property
    def closed(self) -> bool:
        return False


LONGEST = 1 << 40
"""More tokens than any context has."""


@lru_cache(maxsize=256)
def pinned_positions(mask: Mask, count: int) -> tuple[int, ...]:
    """The first `count` keys that decoding with the mask pins, ascending; all of them if there are fewer.

    A mask may pin a number of keys that grows with the context, such as the last of every block; a context that is long
    enough is then assumed.
    """
    found, keys = mask.reach(None), max(1, count)
    if found.window is None and mask.reach(keys).window is not None:
        found = mask.reach(keys)
        while found.count < count and keys < LONGEST:
            keys *= 2
            found = mask.reach(keys)
    return found.positions[:count]


def told(field: str, length: Positions | None) -> Positions:
    """`length`, the number of keys that a mask is bound to; raises `InvalidValue` if it is None."""
    if length is None:
        raise InvalidValue.of(field, length, "the number of keys, set by mask.over(keys)")
    return length


def pick(table: Sequence[int] | bytes, index: Positions) -> Any:
    """The entries of a table at `index`, an int or an integer tensor with values within the table."""
    if isinstance(index, int):
        return table[index]
    return index.new_tensor(list(table))[index]


def within(position: Positions, length: int) -> tuple[Positions, Any]:
    """The positions with 0 in place of those outside 0 to `length`, exclusive; and whether each is inside."""
    inside = (position >= 0) & (position < length)
    return position * inside, inside
