"""What a handler may want to know about its call."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

REQUEST_ID = "x-request-id"
"""Metadata key: in the request as the client chose it, in the trailing metadata as it was used."""

AUTHORIZATION = "authorization"
"""Metadata key of the bearer token."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What gRPC tells a handler; generic only for type checkers."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: its request id, and its deadline on the clock of `time.monotonic()` in seconds, or None.

    `tenant` stands for the bearer token that the caller gave, without telling it; empty without one. Where the door
    asks for no token it is what the caller says.
    """

    request_id: str
    deadline: float | None
    tenant: str = ""

    def remaining(self) -> float | None:
        """Seconds until the deadline, negative when it is over; None without one. Use it across processes."""
        return None if self.deadline is None else self.deadline - time.monotonic()


def call_of(context: Context) -> Call:
    """The call that `context` belongs to."""
    remaining: float | None = context.time_remaining()  # the stubs forget that there may be none
    deadline = None if remaining is None else time.monotonic() + remaining
    return Call(request_id=request_id_of(context), deadline=deadline, tenant=tenant_of(context))


def tenant_of(context: Context) -> str:
    """The same word for every call with the same bearer token; empty without a token."""
    given = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION]
    return _name(str(given[0])) if given else ""


def tenant_named(token: str) -> str:
    """The tenant of those who give this bearer token."""
    return _name(f"Bearer {token}")


def _name(given: str) -> str:
    return hashlib.blake2b(given.encode(), digest_size=16).hexdigest()


def request_id_of(context: Context) -> str:
    """The id under which the call is logged; "-" outside a gateway."""
    for key, value in context.trailing_metadata() or ():
        if key == REQUEST_ID:
            return str(value)
    return "-"
