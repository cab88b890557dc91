"""Answers for people as facts, for programs as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def print_json(value: Any) -> None:
    """Print `value` as indented JSON; words of a key are joined by `_`, where a table has them apart."""
    print(json.dumps(_snake_case(value), indent=2, ensure_ascii=False))


def _snake_case(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key).replace(" ", "_"): _snake_case(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_snake_case(item) for item in value]
    return value


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values in two columns; a value of several lines is indented below its name."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        first, *rest = str(value).splitlines() or [""]
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
