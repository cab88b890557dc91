"""Checks of options."""

from __future__ import annotations

from attn_core.errors import InvalidValue


def check_whole(field: str, value: object, unit: str) -> None:
    """Raise `InvalidValue` unless the value is a whole number of `unit`s from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidValue.of(field, value, f"a whole number of {unit} from 1")
