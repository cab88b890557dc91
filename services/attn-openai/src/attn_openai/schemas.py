"""JSON schemas as clients write them, for the library that constrains output by them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue

COMPACT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The JSON format for llguidance: without optional blanks and new lines, which small models would repeat for ever."""
LENIENT = {**COMPACT, "lenient": True}
"""The same, ignoring keywords that llguidance does not implement."""
OPTIONS = "x-guidance"
"""The key of a schema with options for llguidance."""
LOOK_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9bB]")
"""What a regular expression cannot have in an automaton."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LARGEST = 10**18
"""The largest bound of numbers that llguidance takes; beyond it numbers are bounded by this."""
FORMATS = frozenset(["date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""The formats by which texts are constrained; others are annotations, as JSON Schema has it."""
ONE_SCHEMA = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")


def schema_of(schema: Any, field: str, *, strict: bool = True) -> dict[str, Any]:
    """A JSON schema for llguidance, which allows no more whitespace than `json.dumps` writes.

    True is the schema of any value. Unless `strict`, what llguidance does not support is left out, so the schema allows
    more. Raises `InvalidValue`, naming `field`, for what is no schema, and for false, the schema of no value at all.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidValue.of(field, schema, "a JSON schema: an object, or true for any JSON")
    written(schema, field)
    options = COMPACT if strict else LENIENT
    return {OPTIONS: {**options, "coerce_one_of": True}, **_supported(schema, strict=strict)}


def compact_schema(schema: Any, field: str) -> str:
    """A JSON schema as text; see `schema_of`."""
    return written(schema_of(schema, field), field)


def _supported(schema: Any, *, strict: bool) -> Any:
    """A schema in the keywords that llguidance supports, meaning the same; unless `strict`, without what has none."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED_SCHEMAS and isinstance(value, dict):
            found[key] = {name: _supported(each, strict=strict) for name, each in value.items()}
        elif key in SCHEMAS and isinstance(value, list):
            found[key] = [_supported(each, strict=strict) for each in value]
        elif key in ONE_SCHEMA:
            found[key] = _supported(value, strict=strict)
        elif key in BOUNDS and isinstance(value, int | float) and abs(value) > LARGEST:
            found[key] = LARGEST if value > 0 else -LARGEST
        elif key == "pattern" and not strict and isinstance(value, str) and LOOK_AROUND.search(value):
            continue
        elif key != "format" or (isinstance(value, str) and value in FORMATS):
            found[key] = value
    if found.get("propertyNames") in ({}, {"type": "string"}, True):  # as all names of JSON are
        del found["propertyNames"]
    return found


def written(value: Any, field: str, *, ensure_ascii: bool = True) -> str:
    """A value of a request as JSON; raises `InvalidValue`, naming `field`, for one that is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except RecursionError:
        raise InvalidValue.of(field, "a value that is nested too deeply", "fewer levels") from None
