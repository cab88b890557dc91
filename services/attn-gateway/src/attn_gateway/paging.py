"""Pagination of list calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from attn_core.errors import InvalidValue

DEFAULT_PAGE = 100
LARGEST_PAGE = 1000

Item = TypeVar("Item")


class ListRequest(Protocol):
    """Any request with `page_size` and `page_token`."""

    @property
    def page_size(self) -> int:
        """The maximum number of items; 0 for the default."""
        ...

    @property
    def page_token(self) -> str:
        """The `next_page_token` of the previous page; empty for the first page."""
        ...


def page_of(items: Sequence[Item], request: ListRequest) -> tuple[Sequence[Item], str]:
    """The items of the requested page, and the token of the next page, empty on the last page.

    Raises `InvalidValue` for a size outside 0 to 1000 or a token that no page returned.
    """
    if not 0 <= request.page_size <= LARGEST_PAGE:
        raise InvalidValue.of("page_size", request.page_size, f"0 to {LARGEST_PAGE}")
    token = request.page_token
    if token and not (token.isascii() and token.isdecimal() and int(token[:12]) <= len(items)):
        raise InvalidValue.of("page_token", token, "next_page_token of an earlier page")
    first = int(token) if token else 0
    last = first + (request.page_size or DEFAULT_PAGE)
    return items[first:last], str(last) if last < len(items) else ""
