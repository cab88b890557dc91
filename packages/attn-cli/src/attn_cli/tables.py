"""Tables for people, without the third of a second that a library for terminals takes to load and to draw one."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

GAP = "  "
NEVER_WRAPPED = ("name", "plugin")
NARROWEST = 8
"""Characters that a column keeps, however narrow the terminal."""


def print_table(rows: Sequence[Mapping[str, Any]], empty: str) -> None:
    """Print rows of equal keys as a table, or `empty` where there are none.

    On a terminal the cells are wrapped to its width; into a pipe or a file every row is one line, to be searched.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(table(rows, width)) if rows else empty)


def table(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> list[str]:
    """The lines of a table whose rows have equal keys; `width` in characters, None for as wide as it is."""
    columns = list(rows[0])
    cells = [[" ".join(str(value).split()) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if width is not None:
        widths = _narrowed(columns, widths, width - len(GAP) * (len(columns) - 1))
    rule = GAP.join("─" * wide for wide in widths)
    return [_line(columns, widths), rule, *(line for row in cells for line in _wrapped(row, widths))]


def _narrowed(columns: list[str], widths: list[int], room: int) -> list[int]:
    """Widths that together fit the room, taken a character at a time from the widest column that may be wrapped."""
    widths = list(widths)
    free = [index for index, column in enumerate(columns) if column not in NEVER_WRAPPED]
    for _ in range(sum(widths) - room):
        widest = max(free, key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    return widths


def _wrapped(row: list[str], widths: list[int]) -> list[str]:
    parts = [textwrap.wrap(cell, wide) or [""] for cell, wide in zip(row, widths, strict=True)]
    deepest = max(map(len, parts))
    padded = [part + [""] * (deepest - len(part)) for part in parts]
    return [_line(line, widths) for line in zip(*padded, strict=True)]


def _line(cells: Sequence[str], widths: list[int]) -> str:
    return GAP.join(cell.ljust(wide) for cell, wide in zip(cells, widths, strict=True)).rstrip()
