"""Validators for configuration fields.

Each `require_*` function returns the value it was given, or raises `InvalidValue` that names the field, the value and
what is allowed. Bounds are named as in msgspec and pydantic: `ge` (>=), `gt` (>), `le` (<=), `lt` (<).
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard, TypeVar

from attn_core.errors import InvalidValue

T = TypeVar("T")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether the value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether the value is a finite float, or an int that a float can hold, and not a bool."""
    # Compared with the largest float, as an int that no float can hold is an error for isfinite().
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def whole(value: Any) -> Any:
    """Convert whole floats to ints, in lists too, and leave other values unchanged.

    JSON from other programs and protobuf's Struct have only floats.
    """
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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


def checked(default: Any, check: Callable[..., Any], *arguments: Any, **bounds: Any) -> Any:
    """A field of a dataclass with a check, which `check_fields` calls with the field's name, its value and the rest:

    window: int = checked(256, require_whole, ge=1, unit="tokens")
    """
    return dataclasses.field(default=default, metadata={"check": (check, arguments, bounds)})


def check_fields(record: Any) -> None:
    """Check the fields of a dataclass that it or a base declares with `checked`; each gets what its check returns."""
    for field in dataclasses.fields(record):
        declared = (vars(kind).get("__dataclass_fields__", {}).get(field.name) for kind in type(record).__mro__)
        found = next((one.metadata["check"] for one in declared if one is not None and "check" in one.metadata), None)
        if found is not None:
            check, arguments, bounds = found
            value = check(field.name, getattr(record, field.name), *arguments, **bounds)
            object.__setattr__(record, field.name, value)


def keep_tuples(record: object, *fields: str) -> None:
    """Turn lists given for these fields of a frozen dataclass, and lists in them, into tuples, so that it hashes."""
    for field in fields:
        object.__setattr__(record, field, _as_tuples(getattr(record, field)))


def _as_tuples(value: object) -> object:
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


def require_no_module(field: str, value: object) -> None:
    """Raise `InvalidValue` for data or a function that holds learned tensors, which no layer would register or save.

    Searched are closures, globals that a function reads, partial and bound arguments, and the contents of containers
    and objects. A process without torch has no learned tensors.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    kinds = (torch.nn.Module, torch.nn.Parameter)
    seen: set[int] = set()
    pending: list[tuple[object, int]] = [(value, 0)]
    while pending:
        referenced, depth = pending.pop()
        if isinstance(referenced, kinds):
            kind = "torch.nn.Module" if isinstance(referenced, torch.nn.Module) else "torch.nn.Parameter"
            allowed = "no learned tensors inside: declare them by name, ScoreFunction(function, parameters={...})"
            raise InvalidValue.of(field, f"{kind} {type(referenced).__name__}", allowed)
        if id(referenced) not in seen and depth < DEPTH:
            seen.add(id(referenced))
            pending.extend((part, depth + 1) for part in _referenced_by(referenced))


DEPTH = 4
"""How many levels deep `require_no_module` searches nested objects."""


def _referenced_by(value: object) -> Iterable[object]:
    """The objects that a value refers to, as far as they can hold learned tensors."""
    match value:
        case type() | ModuleType() | str():
            found: tuple[object, ...] = ()
        case Mapping():
            found = tuple(value.values())
        case list() | tuple() | set() | frozenset():
            found = tuple(value)
        case MethodType():
            found = (value.__self__, value.__func__)
        case partial():
            found = (value.func, *value.args, *value.keywords.values())
        case FunctionType():
            read = inspect.getclosurevars(value)
            found = (*read.nonlocals.values(), *read.globals.values(), *(value.__defaults__ or ()))
        case _:
            called = getattr(type(value), "__call__", None)  # noqa: B004 -- its code may read what holds something
            own = tuple(getattr(value, "__dict__", {}).values())
            found = (*own, called) if isinstance(called, FunctionType) else own
    return found


def _bounds(ge: float | None, gt: float | None, le: float | None, lt: float | None) -> str:
    """The bounds as a text to append to "a number": " from 0, below 1"."""
    first = f" from {ge}" if ge is not None else f" above {gt}" if gt is not None else ""
    if le is not None:
        return f"{first} to {le}" if ge is not None else f"{first}{',' if first else ''} at most {le}"
    if lt is not None:
        return f"{first}{',' if first else ''} below {lt}"
    return first
