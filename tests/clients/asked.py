"""What all clients are asked to do, and what they are to return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODEL, ENCODER, KEY = "scripted", "tiny-bert", "none"
ASK, ASK_JSON, TASK = "Say hello.", "The weather as JSON.", "Add 2 and 3, then multiply the sum by 4."
HELLO, WEATHER, RESULT = "Hello there.", {"city": "Rome", "hot": True}, "20"
CALLED: list[tuple[str, int, int]] = []
"""The tools that were called in the present try."""
TRIES: dict[str, tuple[str, dict[str, Callable[[str], Any]]]] = {}
"""The package and the tries of each client, by its name and then by feature."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    CALLED.append(("add", a, b))
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    CALLED.append(("multiply", a, b))
    return a * b


def tries(client: str, package: str = "") -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a try of a client, whose feature is the name of the function without the client's."""

    def registered(function: Callable[[str], Any]) -> Callable[[str], Any]:
        feature = function.__name__.partition("__")[2].replace("_", " ")
        TRIES.setdefault(client, (package or client, {}))[1][feature] = function
        return function

    return registered


def same(found: Any, wanted: Any) -> None:
    """Raise if a client returned something else than was said."""
    if found != wanted:
        raise AssertionError(f"{found!r} instead of {wanted!r}")


def did_task(answer: Any) -> None:
    """Raise unless both tools were called and the answer has the result."""
    same(CALLED, [("add", 2, 3), ("multiply", 5, 4)])
    if RESULT not in str(answer):
        raise AssertionError(f"{answer!r} has no {RESULT}")


def refused(kind: type[Exception], function: Callable[[], Any]) -> None:
    """Raise unless a call raises this kind of error."""
    try:
        function()
    except kind:
        return
    raise AssertionError("not refused")
