"""Masks made of masks: and, or, not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from attn_core.errors import InvalidValue
from attn_core.mask import runs as algebra
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs


@dataclass(frozen=True)
class Pair(Mask):
    """Two masks that something is made of; raises `InvalidValue` where they differ by head for other numbers of heads.

    What it is made of is resolved part by part.
    """

    one: Mask
    other: Mask
    kind = "composite"

    def __post_init__(self) -> None:
        numbers = {part.heads for part in self.parts} - {None}
        if len(numbers) > 1:
            raise InvalidValue.of("mask.heads", sorted(map(str, numbers)), "one number of heads in all parts of a mask")

    @property
    def parts(self) -> tuple[Mask, Mask]:
        """Both masks."""
        return self.one, self.other

    @property
    def heads(self) -> int | None:
        return self.one.heads or self.other.heads

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


@dataclass(frozen=True)
class Both(Pair):
    """What both masks allow."""

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.one.allows(query, key) & self.other.allows(query, key)

    @property
    def lookback(self) -> int | None:
        return _tighter(self.one.lookback, self.other.lookback)

    @property
    def lookahead(self) -> int | None:
        return _tighter(self.one.lookahead, self.other.lookahead)

    @property
    def period(self) -> int:
        return max(self.one.period, self.other.period)

    @property
    def split(self) -> tuple[Mask, ...]:
        return tuple(Both(one, other) for one in self.one.split for other in self.other.split)

    def runs(self, query: int, keys: int) -> Runs:
        return algebra.intersect(self.one.runs(query, keys), self.other.runs(query, keys))


@dataclass(frozen=True)
class Either(Pair):
    """What one of the masks, or both, allow."""

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.one.allows(query, key) | self.other.allows(query, key)

    @property
    def lookback(self) -> int | None:
        return _looser(self.one.lookback, self.other.lookback)

    @property
    def lookahead(self) -> int | None:
        return _looser(self.one.lookahead, self.other.lookahead)

    @property
    def period(self) -> int:
        return self.one.period if self.one.period == self.other.period else 1

    def runs(self, query: int, keys: int) -> Runs:
        return algebra.unite(self.one.runs(query, keys), self.other.runs(query, keys))


@dataclass(frozen=True)
class Not(Mask):
    """What the mask does not allow."""

    mask: Mask
    kind = "composite"

    def allows(self, query: Positions, key: Positions) -> Any:
        # `^ True` negates Python booleans and boolean tensors alike; `~True` would be -2.
        return self.mask.allows(query, key) ^ True

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
        return algebra.complement(self.mask.runs(query, keys), keys)

    def count(self, queries: int, keys: int) -> int:
        return queries * keys * (self.heads or 1) - self.mask.count(queries, keys)


def _tighter(one: int | None, other: int | None) -> int | None:
    return min((bound for bound in (one, other) if bound is not None), default=None)


def _looser(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)
