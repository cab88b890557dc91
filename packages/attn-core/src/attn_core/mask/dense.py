"""A mask given pair by pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from attn_core.errors import InvalidValue
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, of_keys
from attn_core.mask.table import pick, within


@dataclass(frozen=True)
class Dense(Mask):
    """Row q says which keys the query at position q sees, a byte each; outside of the table nothing is seen.

    Build it with `Dense.of`, from nested lists such as a boolean tensor's `tolist()`.
    """

    rows: tuple[bytes, ...]
    kind = "dense"

    def __post_init__(self) -> None:
        if len({len(row) for row in self.rows}) > 1:
            raise InvalidValue.of("dense.rows", [len(row) for row in self.rows], "rows of one length")

    @classmethod
    def of(cls, rows: Iterable[Iterable[object]]) -> Self:
        """The mask of rows of truth values."""
        return cls(tuple(bytes(bool(entry) for entry in row) for row in rows))

    @property
    def columns(self) -> int:
        """Keys of the table."""
        return len(self.rows[0]) if self.rows else 0

    def allows(self, query: Positions, key: Positions) -> Any:
        row, query_inside = within(query, len(self.rows))
        column, key_inside = within(key, self.columns)
        inside = query_inside & key_inside
        return inside & (pick(self._flat, row * self.columns + column) == 1) if self._flat else inside

    @cached_property
    def lookback(self) -> int:
        seen = [query - row.index(1) for query, row in enumerate(self.rows) if 1 in row]
        return max([0, *seen])

    @cached_property
    def lookahead(self) -> int:
        seen = [row.rindex(1) - query for query, row in enumerate(self.rows) if 1 in row]
        return max([0, *seen])

    def runs(self, query: int, keys: int) -> Runs:
        if not 0 <= query < len(self.rows):
            return []
        return of_keys(key for key, seen in enumerate(self.rows[query][:keys]) if seen)

    @cached_property
    def _flat(self) -> bytes:
        return b"".join(self.rows)
