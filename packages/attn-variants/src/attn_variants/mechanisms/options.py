"""Checks of options."""

from __future__ import annotations

import math

from attn_core.errors import InvalidValue


def check_whole(field: str, value: object, unit: str, least: int = 1) -> None:
    """Raise `InvalidValue` unless the value is a whole number of `unit`s from `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidValue.of(field, value, f"a whole number of {unit} from {least}")


def check_number(field: str, value: object, above: float, most: float = math.inf) -> None:
    """Raise `InvalidValue` unless the value is a finite number above `above` and at most `most`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not above < value <= most:  # type: ignore[arg-type, operator]
        top = "" if math.isinf(most) else f", at most {most:g}"
        raise InvalidValue.of(field, value, f"a number above {above:g}{top}")


def check_flag(field: str, value: object) -> None:
    """Raise `InvalidValue` unless the value is True or False."""
    if not isinstance(value, bool):
        raise InvalidValue.of(field, value, "true or false")


def whole_numbers(field: str, value: object) -> tuple[int, ...]:
    """The entries of a list or tuple of whole numbers from 0, at least one; raises `InvalidValue` for anything else."""
    entries = tuple(value) if isinstance(value, (list, tuple)) else ()
    whole = [int(entry) for entry in entries if isinstance(entry, (int, float)) and entry == int(entry) and entry >= 0]
    if not entries or len(whole) != len(entries):
        raise InvalidValue.of(field, value, "a list of whole numbers from 0")
    return tuple(whole)
