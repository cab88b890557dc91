"""Validators accept what is within their bounds and say what is allowed otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from attn_core.checks import check_fields, checked, require_choice, require_flag, require_number, require_whole
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


def test_declared_checks_hold_for_the_fields_of_a_class_and_of_those_that_inherit_or_redefine_them() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Base:
        window: int = checked(4, require_whole, ge=1)
        sizes: tuple[int, ...] = checked((), lambda name, value, least: tuple(max(each, least) for each in value), 2)

        def __post_init__(self) -> None:
            check_fields(self)

    @dataclass(frozen=True, kw_only=True)
    class Wider(Base):
        window: int = 8

    assert (Base().window, Wider().window, Base(sizes=(1, 3)).sizes) == (4, 8, (2, 3))
    for kind in (Base, Wider):
        with pytest.raises(InvalidValue, match="window"):
            kind(window=0)
