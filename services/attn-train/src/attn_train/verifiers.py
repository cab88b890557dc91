"""Rewards that verify a completion: the number that it arrives at, a JSON schema, a regular expression."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

NUMBER = re.compile(r"(?:(?<![\w.)\]])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:\s*/\s*\d+)?")
FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
MARKED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}|####([^\n]*)")
MOST_DIGITS = 1000
"""Longer numbers are no answers."""


def last_number(text: str) -> Fraction | None:
    r"""Return the last number of a text, or of its last `\boxed{}` or line behind `####` if there is one; exactly.

    Numbers may have thousands separators, a fraction or decimals. None without one.
    """
    marked = MARKED.findall(text)
    within = (marked[-1][0] or marked[-1][1]) if marked else text
    numbers = NUMBER.findall(FRACTION.sub(r"\1/\2", within.replace("\u2212", "-")))
    if not numbers or len(numbers[-1]) > MOST_DIGITS:
        return None
    above, _, below = numbers[-1].replace(",", "").partition("/")
    divisor = int(below or 1)
    return Fraction(above) / divisor if divisor else None


def accuracy(completions: Sequence[str], answer: Sequence[Any]) -> list[float]:
    """Return 1 for completions whose `last_number` equals that of `answer`, else 0.

    Raises `ValueError` for an answer without a number.
    """
    found = []
    for completion, right in zip(completions, answer, strict=True):
        wanted = last_number(str(right))
        if wanted is None:
            raise ValueError(f"the answer {str(right)[:80]!r} has no number")
        found.append(float(last_number(completion) == wanted))
    return found


@functools.lru_cache(256)
def _validator(schema: str) -> Validator:
    value = json.loads(schema)
    kind = validator_for(value)
    kind.check_schema(value)
    # An own registry, as the default one would fetch references from the network.
    return kind(value, registry=Registry())


def json_schema(completions: Sequence[str], schema: Sequence[Any]) -> list[float]:
    """Return 1 for completions that are JSON and valid by their schema, which is a text or an object, else 0.

    Raises jsonschema's `SchemaError` for a schema that is none.
    """
    found = []
    for completion, given in zip(completions, schema, strict=True):
        validator = _validator(given if isinstance(given, str) else json.dumps(given))
        try:
            validator.validate(json.loads(completion, parse_constant=_no_number))
            found.append(1.0)
        except (ValueError, ValidationError, RecursionError):
            found.append(0.0)
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def regex(completions: Sequence[str], pattern: Sequence[str]) -> list[float]:
    """Return 1 for completions that a regular expression matches as a whole, else 0; raises `re.error`."""
    pairs = zip(completions, pattern, strict=True)
    return [float(re.fullmatch(expression, completion) is not None) for completion, expression in pairs]
