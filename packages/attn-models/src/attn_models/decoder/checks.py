"""Checks of single values, which name the field, what was given and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from attn_core.errors import InvalidValue, UnknownName


def require_count(name: str, value: object) -> None:
    """Raises InvalidValue unless `value` is a whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidValue.of(name, value, "a whole number from 1")


def require_word(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raises InvalidValue unless `value` is one of the words."""
    if value not in allowed:
        raise InvalidValue.of(name, value, " or ".join(repr(word) for word in allowed))


def require_flag(name: str, value: object) -> None:
    """Raises InvalidValue unless `value` is True or False."""
    if not isinstance(value, bool):
        raise InvalidValue.of(name, value, "true or false")


def require_between(name: str, value: object, low: float, high: float) -> None:
    """Raises InvalidValue unless `value` is a finite number, `low` <= value < `high`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value < high:  # type: ignore[arg-type, operator]
        top = "" if math.isinf(high) else f", below {high:g}"
        raise InvalidValue.of(name, value, f"a number from {low:g}{top}")


def require_choice(mechanism: object, options: object) -> None:
    """Raises InvalidValue unless these are a mechanism's name and its options by name."""
    if not isinstance(mechanism, str):
        raise InvalidValue.of("mechanism", mechanism, "a mechanism's name")
    if not isinstance(options, Mapping):
        raise InvalidValue.of("options", options, "options by name")


def plain_fields(kind: type[Any], values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The plain values of the fields of a dataclass `kind`, whole floats as ints.

    Raises `UnknownName` for a field that does not exist, `InvalidValue` for one that is missing; `what` is a noun with
    its article.
    """
    known = {item.name: item for item in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            raise UnknownName.of(f"field of {what}", name, known)
    for name, item in known.items():
        needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if needed and name not in values:
            raise InvalidValue(f"{name}: {what} needs it; none was given", field=name)
    return {name: whole(value) for name, value in values.items()}


def whole(value: Any) -> Any:
    """Whole floats as ints: JSON from other programs and protobuf's Struct have only floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
