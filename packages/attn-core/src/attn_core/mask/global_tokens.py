"""Tokens that are seen by all, or see all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.errors import InvalidValue
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, of_keys, run


@dataclass(frozen=True)
class GlobalKeys(Mask):
    """The keys at `positions` are seen by every query, and no others.

    It is what a global token adds to the windows of the others (Beltagy et al. 2020).
    """

    positions: tuple[int, ...]
    kind = "global"

    def __post_init__(self) -> None:
        if any(position < 0 for position in self.positions):
            raise InvalidValue.of("global.positions", self.positions, "positions from 0")

    def allows(self, query: Positions, key: Positions) -> Any:
        return is_one_of(key, self.positions) & (query == query)

    def runs(self, query: int, keys: int) -> Runs:
        return of_keys(self._among(keys))

    def count(self, queries: int, keys: int) -> int:
        return queries * len(self._among(keys))

    def _among(self, keys: int) -> list[int]:
        return sorted({position for position in self.positions if position < keys})


@dataclass(frozen=True)
class GlobalTokens(GlobalKeys):
    """The tokens at `positions` are seen by all and see all (Beltagy et al. 2020; Zaheer et al. 2020's global)."""

    def allows(self, query: Positions, key: Positions) -> Any:
        return is_one_of(key, self.positions) | is_one_of(query, self.positions)

    def runs(self, query: int, keys: int) -> Runs:
        return run(0, keys) if query in self.positions else super().runs(query, keys)

    def count(self, queries: int, keys: int) -> int:
        rows = sum(keys - queries <= position < keys for position in set(self.positions))
        return rows * keys + (queries - rows) * len(self._among(keys))


def is_one_of(position: Positions, positions: tuple[int, ...]) -> Any:
    """Whether positions are among some."""
    found = position < 0
    for one in positions:
        found = found | (position == one)
    return found & (position >= 0)
