"""Human-readable output of facts and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.text_files import lines_of


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print names, with spaces for underscores, and values in two columns; further lines of a value are indented."""
    facts = {name.replace("_", " "): value for name, value in facts.items()}
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        first, *rest = lines_of(str(value)) or [""]
        print(f"{name:<{width}}  {first}")
        for line in rest:
            print(f"{'':<{width}}  {line}")


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
