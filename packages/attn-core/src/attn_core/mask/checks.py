"""Checks that masks share."""

from __future__ import annotations

from attn_core.errors import InvalidValue
from attn_core.mask.mask import Positions


def at_least(field: str, value: object, least: int) -> None:
    """Raise `InvalidValue` unless `value` is a whole number from `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidValue.of(field, value, f"a whole number from {least}")


def told(field: str, length: Positions | None) -> Positions:
    """The length that a mask was told; raises `InvalidValue` where it was not."""
    if length is None:
        raise InvalidValue.of(field, length, "the number of keys: ask mask.over(keys)")
    return length
