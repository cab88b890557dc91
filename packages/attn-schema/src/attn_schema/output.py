"""What commands print: answers on standard output, and what goes on beside them on standard error.

An answer is a table or facts for people, and with `--json` one of three shapes for programs: a list is an array, one
thing an object, and what comes bit by bit an object a line. Keys are in snake_case, values numbers, words, true, false
and null. `--quiet` leaves standard error to errors; with `--verbose` a command says there more of what it does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import typer

UNWRAPPED = 10_000
"""Width in characters into pipes and files, where no row is wrapped."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Verbosity(IntEnum):
    """How much a command says beside its answer, on standard error."""

    QUIET = -1
    NORMAL = 0
    VERBOSE = 1


_said = [Verbosity.NORMAL]


def verbosity() -> Verbosity:
    """How much this process says beside its answers."""
    return _said[0]


def set_verbosity(wanted: Verbosity) -> None:
    """Say so much from now on."""
    _said[0] = wanted


def note(text: str) -> None:
    """Tell something beside the answer, on standard error; not with `--quiet`."""
    if verbosity() > Verbosity.QUIET:
        typer.echo(text, err=True)


def detail(text: str) -> None:
    """Tell on standard error what only `--verbose` asks for."""
    if verbosity() >= Verbosity.VERBOSE:
        typer.echo(text, err=True)


def to_json(value: Any) -> str:
    """A noun or plain value as one line of JSON."""
    return msgspec.json.encode(value, enc_hook=str).decode()


def print_json(value: Any) -> None:
    """Print a noun or plain value as one line of JSON."""
    sys.stdout.write(to_json(value) + "\n")
    sys.stdout.flush()


def snake_case(heading: str) -> str:
    """The heading of a column as a key: "KV cache bytes" is kv_cache_bytes."""
    return "_".join(re.findall(r"[a-z0-9]+", heading.lower()))


def print_rows(rows: Sequence[Mapping[str, Any]], empty: str, *, json: bool) -> None:
    """Print rows as a table, or as a JSON array of objects whose keys are the headings in snake_case."""
    if json:
        print_json([{snake_case(heading): value for heading, value in row.items()} for row in rows])
    else:
        print_table(rows, empty)


def print_table(rows: Sequence[Mapping[str, Any]], empty: str, *, title: str | None = None) -> None:
    """Print rows with the same keys as a table, or the sentence `empty` if there are none; what is None stays blank.

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
        table.add_row(*map(_cell, row.values()))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else UNWRAPPED, markup=False).print(table)


def _cell(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split())
