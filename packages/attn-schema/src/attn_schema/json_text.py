"""JSON text of nouns and plain values, also of numbers that are not finite, for which JSON has no spelling.

They are written as protobuf's JSON writes them: the texts "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec


def spelled(value: Any) -> Any:
    """A plain value in which every number that is not finite is its text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {spelled(key): spelled(item) for key, item in value.items()}
    return type(value)(map(spelled, value)) if isinstance(value, list | tuple) else value


def json_text(value: Any, *, indent: int = 0) -> str:
    """A noun or plain value as JSON, with the keys of mappings sorted and the fields of nouns in their order.

    So equal values give equal text, which is one line unless `indent` is given. A value that JSON cannot represent is
    written as its text.
    """
    plain = msgspec.to_builtins(value, enc_hook=str)
    shown = spelled(plain)
    text = msgspec.json.encode(value if shown == plain else shown, order="deterministic", enc_hook=str)
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


def number(value: float | str | None) -> float:
    """The number that `json_text` wrote, or one of an earlier version, which wrote null for those that are not finite.

    Raises `ValueError` for a text that is no number.
    """
    return math.nan if value is None else float(value)
