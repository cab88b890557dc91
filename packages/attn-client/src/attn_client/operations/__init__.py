"""Remote calls as data: the request, and the conversion of its response; nothing here does any input or output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Operation(Generic[Response, Result]):
    """One call: its full gRPC method name, request, response type, and the function that converts a response.

    `repeatable` is whether the call is idempotent, so that it may safely be sent twice.
    """

    method: str
    request: Message
    response: type[Response]
    result: Callable[[Response], Result]
    repeatable: bool = True


@dataclass(frozen=True)
class Page(Generic[Result]):
    """One page of a list, and the token of the next page; empty on the last page."""

    items: list[Result]
    following: str


def nothing(_: Message) -> None:
    """Convert the response of a call that has no result."""
