"""What a handler may want to know about its call."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from attn_core.errors import Incompatible, InternalError, PermissionDenied

REQUEST_ID = "x-request-id"
"""Metadata key: in the request as the client chose it, in the trailing metadata as it was used."""

AUTHORIZATION = "authorization"
"""Metadata key of the bearer token."""

LOCAL = "local"
"""The peer of calls from this process."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What gRPC tells a handler; generic only for type checkers."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who calls, as its token says. `owner` is the tenant that what it makes belongs to, empty for everybody's."""

    tenant: str
    owner: str
    is_admin: bool

    @property
    def sees(self) -> str | None:
        """The tenant whose things it sees, beside everybody's; None for an admin, who sees all."""
        return None if self.is_admin else self.tenant


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Who makes the call of this task; None where no token is asked for, and everybody is an admin."""


def spend_nothing(tokens: int) -> None:
    """Count tokens of a tenant without a limit."""
    del tokens


SPEND: ContextVar[Callable[[int], None]] = ContextVar("spend", default=spend_nothing)
"""Counts tokens of the call of this task."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: its request id, and its deadline on the clock of `time.monotonic()` in seconds, or None.

    `tenant` is the tenant of the bearer token that the caller gave; empty without one. Where the server asks for no
    token it is what the caller says, and nothing belongs to anybody.
    """

    request_id: str
    deadline: float | None
    tenant: str = ""
    caller: Caller = Caller(tenant="", owner="", is_admin=True)
    spend: Callable[[int], None] = spend_nothing
    """Counts tokens of prompts and completions against the limit of the tenant."""

    def require_admin(self, what: str) -> None:
        """Raise `PermissionDenied` unless an admin calls."""
        if not self.caller.is_admin:
            raise PermissionDenied(f"{what} is for admins; this token has the role user", role="user")

    def remaining(self) -> float | None:
        """Seconds until the deadline, negative when it is over; None without one. Use it across processes."""
        return None if self.deadline is None else self.deadline - time.monotonic()


def call_of(context: Context) -> Call:
    """The call that `context` belongs to."""
    remaining: float | None = context.time_remaining()  # the stubs forget that there may be none
    deadline = None if remaining is None else time.monotonic() + remaining
    caller = CALLER.get() or Caller(tenant=tenant_of(context), owner="", is_admin=True)
    return Call(
        request_id=request_id_of(context), deadline=deadline, tenant=caller.tenant, caller=caller, spend=SPEND.get()
    )


def tenant_of(context: Context) -> str:
    """The same word for every call with the same bearer token; empty without a token."""
    given = authorization_in(context.invocation_metadata())
    return _name(given[0]) if given else ""


def authorization_in(metadata: Any) -> list[str]:
    """The values of `authorization` in a call's metadata, which may be None."""
    return [str(value) for key, value in metadata or () if key == AUTHORIZATION]


def tenant_named(token: str) -> str:
    """The tenant of those who give this bearer token, where the file of tokens gives it no other name."""
    return _name(f"Bearer {token}")


def _name(given: str) -> str:
    return hashlib.blake2b(given.encode(), digest_size=16).hexdigest()


def request_id_of(context: Context) -> str:
    """The id under which the call is logged; "-" outside a gateway."""
    for key, value in context.trailing_metadata() or ():
        if key == REQUEST_ID:
            return str(value)
    return "-"


class LocalContext:
    """What a handler is told of a call that did not come over gRPC: as much of its context as interceptors use.

    `deadline` is on the clock of `time.monotonic()`, in seconds.
    """

    def __init__(self, metadata: Sequence[tuple[str, str]], deadline: float | None) -> None:
        self._metadata = tuple(metadata)
        self._deadline = deadline
        self._trailing: tuple[tuple[str, str | bytes], ...] = ()
        self._code: Any = None
        self._details = ""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of the caller."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """Keep what comes with the end of the call."""
        self._trailing = tuple(metadata)

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What comes with the end of the call."""
        return self._trailing

    def set_code(self, code: Any) -> None:
        """Note the status of the call."""
        self._code = code

    def code(self) -> Any:
        """The status of the call; None if it was not set."""
        return self._code

    def set_details(self, details: str) -> None:
        """Note the message of the status."""
        self._details = details

    def details(self) -> str:
        """The message of the status."""
        return self._details

    def peer(self) -> str:
        """Where the call comes from."""
        return LOCAL

    def auth_context(self) -> dict[str, Any]:
        """What TLS says of the caller: nothing, as there is none in between."""
        return {}

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call, for a handler that did not raise an error of ours.

        Raises `Incompatible` with the details for what the server does not have, else `InternalError`.
        """
        del trailing_metadata
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise Incompatible(details, code=code.name)
        raise InternalError(details or code.name, code=code.name)
