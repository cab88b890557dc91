"""Checks of single config values, and a base class of configs that are read from and written as plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from attn_core.checks import is_number, require_whole
from attn_core.errors import InvalidValue, UnknownName
from attn_schema.model import MAX_LAYERS
from attn_schema.schema import MAX_INT32


def require_count(name: str, value: object) -> None:
    """Raise `InvalidValue` unless `value` is a whole number from 1 to `MAX_LAYERS`, if the name ends in "layers", or to
    `MAX_INT32`."""
    require_whole(name, value, ge=1, le=MAX_LAYERS if name.endswith("layers") else MAX_INT32)


def require_word(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise `InvalidValue` unless `value` is one of the `allowed` words."""
    if value not in allowed:
        raise InvalidValue.of(name, value, " or ".join(repr(word) for word in allowed))


def require_flag(name: str, value: object) -> None:
    """Raise `InvalidValue` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise InvalidValue.of(name, value, "true or false")


def require_between(name: str, value: object, low: float, high: float) -> None:
    """Raise `InvalidValue` unless `value` is a finite number with `low` <= `value` < `high`."""
    if not is_number(value) or not low <= value < high:
        top = "" if math.isinf(high) else f", below {high:g}"
        raise InvalidValue.of(name, value, f"a number from {low:g}{top}")


def require_choice(mechanism: object, options: object) -> None:
    """Raise `InvalidValue` unless these are a mechanism's name and a mapping of its options by name."""
    if not isinstance(mechanism, str):
        raise InvalidValue.of("mechanism", mechanism, "a mechanism's name")
    if not isinstance(options, Mapping):
        raise InvalidValue.of("options", options, "options by name")


def plain_fields(kind: type[Any], values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The plain values of the fields of a dataclass `kind`, with whole floats converted to ints.

    Raises `UnknownName` for a field that does not exist, `InvalidValue` for one that is missing; `what` is a noun with
    its article for their messages.
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
    """Convert a whole float to an int, and leave other values unchanged.

    JSON from other programs and protobuf's Struct have only floats.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """Base class of configs that checks its fields: ints are counts from 1, floats are from 0, and floats whose names
    end in "dropout" are below 1. Raises `InvalidValue` for others."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.type == "int":
                require_count(item.name, value)
            elif item.type == "bool":
                require_flag(item.name, value)
            elif item.type == "float":
                require_between(item.name, value, 0.0, 1.0 if item.name.endswith("dropout") else math.inf)

    def plain(self) -> dict[str, Any]:
        """The config as plain values, the inverse of `from_plain`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """The config from plain values such as JSON's, where whole numbers may be floats.

        Raises `UnknownName` for a field that does not exist, `InvalidValue` for a missing or bad one.
        """
        return cls(**plain_fields(cls, values, "the model"))
