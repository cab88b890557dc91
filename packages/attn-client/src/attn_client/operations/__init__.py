"""Calls as data: what is sent and what the answer becomes, without any input or output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Operation(Generic[Response, Result]):
    """One call: its full method name, its request, the type of the answer and what that becomes for the caller.

    `repeatable` says whether nothing is done twice where it is sent twice.
    """

    method: str
    request: Message
    response: type[Response]
    result: Callable[[Response], Result]
    repeatable: bool = True


@dataclass(frozen=True)
class Page(Generic[Result]):
    """Some of a list, and the token of the rest; empty if this is all."""

    items: list[Result]
    following: str


def nothing(_: Message) -> None:
    """The result of a call that only does something."""
