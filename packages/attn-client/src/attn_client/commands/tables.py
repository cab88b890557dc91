"""Tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_table(rows: Sequence[Mapping[str, str]], empty: str) -> None:
    """Print rows of equal keys as a table, or `empty` where there are none."""
    if not rows:
        typer.echo(empty)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
