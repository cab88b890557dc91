"""Scalings as a user writes them: plain values by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue, UnknownName
from attn_core.rotary.scaling import DynamicNtk, LinearScaling, Llama3Scaling, LongRope, RotaryScaling
from attn_core.rotary.yarn import Yarn

KINDS: Mapping[str, type[RotaryScaling]] = {
    scaling.kind: scaling for scaling in (LinearScaling, DynamicNtk, Yarn, Llama3Scaling, LongRope)
}
WHOLE = ("context", "length")


def rotary_scaling(words: object) -> RotaryScaling:
    """The scaling of {"kind": "yarn", "factor": 4, "context": 4096} and the like; fields as of the class of that kind.

    Raises `UnknownName` for a kind or field that does not exist, `InvalidValue` for one that is missing or bad.
    """
    if not isinstance(words, Mapping) or not isinstance(words.get("kind"), str):
        raise InvalidValue.of("scaling", words, f"an object with a `kind` of {', '.join(KINDS)}")
    values = dict(words)
    kind = values.pop("kind")
    if kind not in KINDS:
        raise UnknownName.of("rotary scaling", kind, KINDS)
    fields = {field.name: field for field in dataclasses.fields(KINDS[kind])}
    for name in values:
        if name not in fields:
            raise UnknownName.of(f"field of rotary scaling {kind!r}", name, fields)
    missing = [n for n, field in fields.items() if field.default is dataclasses.MISSING and n not in values]
    if missing:
        raise InvalidValue.of("scaling", dict(words), f"an object that also has {', '.join(missing)}")
    return KINDS[kind](**{name: _typed(name, value) for name, value in values.items()})


def _typed(name: str, value: Any) -> Any:
    """Whole floats as ints where tokens are counted: protobuf's Struct has only floats. Lists as tuples."""
    if name in WHOLE and isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(value) if isinstance(value, list) else value
