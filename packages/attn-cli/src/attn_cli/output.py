"""Human-readable output of facts and numbers."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from attn_schema.output import UNWRAPPED
from attn_schema.text_files import lines_of


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print names, with spaces for underscores, and values in two columns; further lines of a value are indented.

    On a terminal, lines are wrapped between words.
    """
    facts = {name.replace("_", " "): value for name, value in facts.items()}
    width = max(map(len, facts), default=0)
    room = shutil.get_terminal_size().columns - width - 2 if sys.stdout.isatty() else UNWRAPPED
    for name, value in facts.items():
        lines = [part for line in lines_of(str(value)) for part in _wrapped(line, max(room, 20))]
        first, *rest = lines or [""]
        print(f"{name:<{width}}  {first}")
        for line in rest:
            print(f"{'':<{width}}  {line}")


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def human_bytes(count: int) -> str:
    """Bytes in decimal units, as memory is sold: 2.62 GB."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"


def human_count(count: int) -> str:
    """A count with a decimal prefix: 4.29 G."""
    amount = float(count)
    for unit in ("", "k", "M", "G", "T", "P"):
        if amount < 1000 or unit == "P":
            break
        amount /= 1000
    return f"{amount:.0f}" if not unit else f"{amount:.2f} {unit}"
