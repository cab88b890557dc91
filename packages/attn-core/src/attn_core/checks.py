"""Validators for configuration fields.

Each `require_*` function returns the value it was given, or raises `InvalidValue` that names the field, the value and
what is allowed. Bounds are named as in msgspec and pydantic: `ge` (>=), `gt` (>), `le` (<=), `lt` (<).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeGuard, TypeVar

from attn_core.errors import InvalidValue

T = TypeVar("T")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether the value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether the value is a finite int or float and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_whole(
    field: str,
    value: object,
    *,
    ge: int | None = None,
    le: int | None = None,
    multiple_of: int = 1,
    unit: str = "",
    optional: bool = False,
) -> Any:
    """The value, if it is a whole number within the bounds (inclusive) and a multiple of `multiple_of`.

    `unit` is what is counted, for the message, such as "tokens". With `optional`, None is accepted too.
    """
    if optional and value is None:
        return value
    fits = is_whole(value) and not value % multiple_of
    if fits and (ge is None or value >= ge) and (le is None or value <= le):  # type: ignore[operator]
        return value
    kind = "a whole number" if multiple_of == 1 else f"a multiple of {multiple_of}"
    counted = f"{kind} of {unit}" if unit else kind
    raise InvalidValue.of(field, value, counted + _bounds(ge, None, le, None) + (", or none" if optional else ""))


def require_number(
    field: str,
    value: object,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    optional: bool = False,
) -> Any:
    """The value, if it is a finite number within the bounds. With `optional`, None is accepted too."""
    if optional and value is None:
        return value
    inside = (
        is_number(value)
        and (ge is None or value >= ge)
        and (gt is None or value > gt)
        and (le is None or value <= le)
        and (lt is None or value < lt)
    )
    if inside:
        return value
    raise InvalidValue.of(field, value, "a number" + _bounds(ge, gt, le, lt) + (", or none" if optional else ""))


def require_choice(field: str, value: T, choices: Iterable[T]) -> T:
    """The value, if it is one of the choices."""
    allowed = tuple(choices)
    if any(value == choice and type(value) is type(choice) for choice in allowed):
        return value
    raise InvalidValue.of(field, value, "one of " + ", ".join(map(repr, allowed)))


def require_flag(field: str, value: object) -> bool:
    """The value, if it is True or False."""
    if isinstance(value, bool):
        return value
    raise InvalidValue.of(field, value, "true or false")


def _bounds(ge: float | None, gt: float | None, le: float | None, lt: float | None) -> str:
    """The bounds as words behind "a number": " from 0, below 1"."""
    first = f" from {ge}" if ge is not None else f" above {gt}" if gt is not None else ""
    if le is not None:
        return f"{first} to {le}" if ge is not None else f"{first}{',' if first else ''} at most {le}"
    if lt is not None:
        return f"{first}{',' if first else ''} below {lt}"
    return first
