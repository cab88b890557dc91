"""A mask for each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.errors import InvalidValue
from attn_core.mask.mask import Mask, Positions


@dataclass(frozen=True)
class PerHead(Mask):
    """`masks[h]` is the mask of query head h; as many as there are heads.

    It has no predicate of its own: whoever computes attention asks each head's mask by `of_head`.
    """

    masks: tuple[Mask, ...]
    kind = "per_head"

    def __post_init__(self) -> None:
        if not self.masks or any(mask.heads is not None for mask in self.masks):
            allowed = "at least one mask, none of which differs by head itself"
            raise InvalidValue.of("per_head.masks", self.masks, allowed)

    def allows(self, query: Positions, key: Positions) -> Any:
        raise InvalidValue.of("per_head.head", None, "the number of a head: ask mask.of_head(head)")

    @property
    def heads(self) -> int:
        return len(self.masks)

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

    def over(self, keys: Positions) -> PerHead:
        return PerHead(tuple(mask.over(keys) for mask in self.masks)) if self.by_length else self

    def of_head(self, head: int) -> Mask:
        if not 0 <= head < len(self.masks):
            raise InvalidValue.of("head", head, f"a head from 0 to {len(self.masks) - 1}")
        return self.masks[head]

    def count(self, queries: int, keys: int) -> int:
        return sum(mask.count(queries, keys) for mask in self.masks)


def widest(bounds: list[int | None]) -> int | None:
    """The largest of some bounds; None where one is missing."""
    known = [bound for bound in bounds if bound is not None]
    return max(known) if len(known) == len(bounds) else None
