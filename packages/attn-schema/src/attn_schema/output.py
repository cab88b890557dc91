"""The output of commands: results on standard output, messages about progress on standard error.

A result is text or a table for people. With `--json` it is JSON for programs: a list is one array, a single result one
object, and streamed results are one object per line. Keys are in snake_case; values are numbers, strings, true, false
or null; numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity". With `--quiet` only errors are
written to standard error; with `--verbose`, more details of what is done.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import typer

from attn_schema.json_text import spelled

UNWRAPPED = 10_000
"""The table width, in characters, for output to pipes and files, so that no row is wrapped."""
SHORT = 12
"""The longest cell of a table, in characters, that is never wrapped: a number with its unit."""

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class Verbosity(IntEnum):
    """How much a command writes to standard error in addition to its result."""

    QUIET = -1
    NORMAL = 0
    VERBOSE = 1


_current_verbosity = [Verbosity.NORMAL]


def verbosity() -> Verbosity:
    """The verbosity of this process."""
    return _current_verbosity[0]


def set_verbosity(wanted: Verbosity) -> None:
    """Set the verbosity of this process."""
    _current_verbosity[0] = wanted


def significant(value: float) -> str:
    """A number with 4 decimals, or 4 significant digits if it is nearer to 0 than 0.1: 0.6931, 0.0001234, 5.6e-08."""
    return f"{value:.4f}" if abs(value) >= 0.1 else f"{value:.4g}"


def note(text: str) -> None:
    """Write a message to standard error, except with `--quiet`."""
    if verbosity() > Verbosity.QUIET:
        typer.echo(text, err=True)


def detail(text: str) -> None:
    """Write a message to standard error, only with `--verbose`."""
    if verbosity() >= Verbosity.VERBOSE:
        typer.echo(text, err=True)


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Say on standard error what is being waited for: on a terminal until it is done, else by one line at the start.

    What it gives says how far the work is, on a terminal.
    """
    if verbosity() > Verbosity.QUIET and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text) as status:
            yield lambda step: status.update(f"{text}: {step}")
    else:
        note(f"attn: {text} ...")
        yield lambda _: None


def to_json(value: Any) -> str:
    """A noun or plain value as one line of JSON."""
    return msgspec.json.encode(spelled(msgspec.to_builtins(value, enc_hook=str))).decode()


def print_json(value: Any) -> None:
    """Print a noun or plain value as one line of JSON."""
    sys.stdout.write(to_json(value) + "\n")
    sys.stdout.flush()


def snake_case(heading: str) -> str:
    """Turn a column heading into a JSON key: "KV cache bytes" becomes kv_cache_bytes."""
    return "_".join(re.findall(r"[a-z0-9]+", heading.lower()))


def print_rows(rows: Sequence[Mapping[str, Any]], empty: str, *, json: bool) -> None:
    """Print rows as a table, or as a JSON array of objects whose keys are the headings in snake_case."""
    if json:
        print_json([{snake_case(heading): value for heading, value in row.items()} for row in rows])
    else:
        print_table(rows, empty)


def print_table(rows: Sequence[Mapping[str, Any]], empty: str, *, title: str | None = None) -> None:
    """Print rows with the same keys as a table, or the sentence `empty` if there are none; None is a blank cell.

    In a pipe or file, every row is one line. On a terminal, long cells are wrapped between words; where a row does not
    fit so, or becomes long, it is its first cell and an indented paragraph of the others.
    """
    if not rows:
        sys.stdout.write(empty + "\n")
        return
    cells = [[_cell(value) for value in row.values()] for row in rows]
    if not sys.stdout.isatty():
        sys.stdout.write("\n".join([*([title] if title else []), *_lines([list(rows[0]), *cells]), ""]))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, markup=False, highlight=False)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, title=title, title_justify="left")
    needed = 3 * (len(rows[0]) - 1)
    for place, column in enumerate(rows[0]):
        whole = [row[place] for row in cells if place == 0 or len(row[place]) <= SHORT]
        words = [word for row in cells for word in row[place].split()]
        longest = max(map(len, [*column.split(), *whole, *words]))
        needed += longest
        table.add_column(column, overflow="fold", no_wrap=place == 0, min_width=longest)
    for texts in cells:
        table.add_row(*texts)
    paragraphs = _paragraphs(list(rows[0]), cells, console.width)
    lines = len(console.render_lines(table))
    if needed > console.width or (lines > len(rows) + 3 and 3 * lines > 4 * len(paragraphs)):
        console.print(*([title] if title else []), *paragraphs, sep="\n")
    else:
        console.print(table)


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in a pipe or file, headings first: rich takes a tenth of a second to import and print it."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for place, row in enumerate(rows):
        yield "   ".join(text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True))
        if place == 0:
            yield "─" * (sum(widths) + 3 * (len(widths) - 1))


def _paragraphs(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines with each row's first cell, then its other cells with their columns, indented."""
    lines: list[str] = []
    for first, *others in cells:
        said = "; ".join(
            f"{column}: {text.removesuffix('.')}" for column, text in zip(columns[1:], others, strict=True) if text
        )
        lines.append(first)
        lines += textwrap.wrap(said, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _cell(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split())
