"""Remote calls as data: the row, the request, and the conversion of a response; nothing here does input or output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from attn_schema.codec import encode, from_message, message_class
from attn_schema.methods import Method
from google.protobuf.message import Message

Result = TypeVar("Result")


@dataclass(frozen=True)
class Operation(Generic[Result]):
    """One call: its row, its request, and the function that converts a response.

    `repeatable` is whether this call may safely be sent twice; None if its row says so.
    """

    row: Method
    request: msgspec.Struct
    convert: Callable[[Any], Result]
    repeatable: bool | None = None

    @property
    def idempotent(self) -> bool:
        """Whether the call may safely be sent twice."""
        return self.row.repeatable if self.repeatable is None else self.repeatable

    @property
    def codec(self) -> tuple[str, Callable[[msgspec.Struct], bytes], Callable[[bytes], Message]]:
        """What a gRPC channel needs: the path, and the functions that encode requests and parse responses."""
        return self.row.path, encode, message_class(self.row.response).FromString

    def result(self, answer: Message) -> Result:
        """Convert a response."""
        return self.convert(from_message(self.row.response, answer))


@dataclass(frozen=True)
class Page(Generic[Result]):
    """One page of a list, and the token of the next page; empty on the last page."""

    items: tuple[Result, ...]
    following: str


def same(response: Any) -> Any:
    """Convert a response that is the result."""
    return response


def nothing(_: Any) -> None:
    """Convert the response of a call that has no result."""
