"""Validators accept what is within their bounds and say what is allowed otherwise."""

from __future__ import annotations

import pytest

from attn_core.checks import require_choice, require_flag, require_number, require_whole
from attn_core.errors import InvalidValue


def refusal(call: object, *given: object, **bounds: object) -> str:
    with pytest.raises(InvalidValue) as caught:
        call("field", *given, **bounds)  # type: ignore[operator]
    assert caught.value.metadata["field"] == "field"
    return caught.value.metadata["allowed"]


def test_whole_numbers() -> None:
    assert require_whole("field", 3, ge=1, le=3) == 3
    assert require_whole("field", None, ge=1, optional=True) is None
    assert refusal(require_whole, 0, ge=1) == "a whole number from 1"
    assert refusal(require_whole, True, ge=1, le=4) == "a whole number from 1 to 4"
    assert refusal(require_whole, 1.0) == "a whole number"
    assert refusal(require_whole, "1", ge=0, unit="tokens", optional=True) == "a whole number of tokens from 0, or none"
    assert refusal(require_whole, 3, ge=2, multiple_of=2) == "a multiple of 2 from 2"
    assert refusal(require_whole, 5, le=4) == "a whole number at most 4"


def test_numbers() -> None:
    assert require_number("field", 0, ge=0, lt=1) == 0
    assert refusal(require_number, 1, ge=0, lt=1) == "a number from 0, below 1"
    assert refusal(require_number, 0, gt=0) == "a number above 0"
    assert refusal(require_number, float("nan"), ge=0, le=1) == "a number from 0 to 1"
    assert refusal(require_number, float("inf"), gt=0, le=9) == "a number above 0, at most 9"
    assert refusal(require_number, False, optional=True) == "a number, or none"


def test_choices_and_flags() -> None:
    assert require_choice("field", "a", ("a", "b")) == "a"
    assert refusal(require_choice, "c", ("a", "b")) == "one of 'a', 'b'"
    assert refusal(require_choice, True, (1, 2)) == "one of 1, 2"
    assert require_flag("field", False) is False
    assert refusal(require_flag, 0) == "true or false"
