"""Tables for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

UNWRAPPED = 10_000
"""Characters in which every row has room."""


def print_table(rows: Sequence[Mapping[str, str]], empty: str) -> None:
    """Print rows of equal keys as a table, or `empty` where there are none.

    On a terminal cells but the first are wrapped to its width; into a pipe or a file every row is one line.
    """
    if not rows:
        typer.echo(empty)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(rows[0]):
        table.add_column(column, overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*row.values())
    Console(width=None if sys.stdout.isatty() else UNWRAPPED).print(table)
