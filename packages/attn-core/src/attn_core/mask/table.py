"""Looking up a table at positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_core.mask.mask import Positions


def pick(table: Sequence[int] | bytes, index: Positions) -> Any:
    """Entries of a table at an int or an integer tensor; of the index's kind. The index must be within the table."""
    if isinstance(index, int):
        return table[index]
    return index.new_tensor(list(table))[index]


def within(position: Positions, length: int) -> tuple[Positions, Any]:
    """The positions, with 0 in place of those outside 0 to `length`, exclusive, and which are inside."""
    inside = (position >= 0) & (position < length)
    return position * inside, inside
