"""What commands print: tables for people, one line a row into pipes, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

UNWRAPPED = 10_000
"""Width in characters into pipes and files, where no row is wrapped."""


def to_json(value: Any) -> str:
    """A noun or plain value as one line of JSON."""
    return msgspec.json.encode(value, enc_hook=str).decode()


def print_json(value: Any) -> None:
    """Print a noun or plain value as one line of JSON."""
    sys.stdout.write(to_json(value) + "\n")
    sys.stdout.flush()


def print_table(rows: Sequence[Mapping[str, Any]], empty: str, *, title: str | None = None) -> None:
    """Print rows with the same keys as a table, or the sentence `empty` if there are none.

    On a terminal, cells are wrapped to its width; into a pipe or file, every row is one line.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    if not rows:
        sys.stdout.write(empty + "\n")
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, title=title, title_justify="left")
    for place, column in enumerate(rows[0]):
        table.add_column(column, overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(" ".join(str(cell).split()) for cell in row.values()))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else UNWRAPPED, markup=False).print(table)
