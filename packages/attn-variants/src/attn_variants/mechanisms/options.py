"""Checks of options."""

from __future__ import annotations

from attn_core.errors import InvalidValue


def check_whole(field: str, value: object, unit: str) -> None:
    """Raise `InvalidValue` unless the value is a whole number of `unit`s from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidValue.of(field, value, f"a whole number of {unit} from 1")


def whole_numbers(field: str, value: object) -> tuple[int, ...]:
    """The entries of a list or tuple of whole numbers from 0, at least one; raises `InvalidValue` for anything else."""
    entries = tuple(value) if isinstance(value, (list, tuple)) else ()
    whole = [int(entry) for entry in entries if isinstance(entry, (int, float)) and entry == int(entry) and entry >= 0]
    if not entries or len(whole) != len(entries):
        raise InvalidValue.of(field, value, "a list of whole numbers from 0")
    return tuple(whole)
