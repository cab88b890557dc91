"""Information about a call for its handler: caller, tenant, request id and deadline."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from attn_core.errors import Incompatible, InternalError, PermissionDenied

REQUEST_ID = "x-request-id"
"""Metadata key of the request id: in the request the client's choice, in the trailing metadata the one used."""

AUTHORIZATION = "authorization"
"""Metadata key of the bearer token."""

LOCAL = "local"
"""The peer name of calls from this process."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""The context that gRPC passes to a handler; generic only for type checkers."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The caller, identified by its token. `owner` is the tenant that owns what it creates; empty means all tenants.

    `max_models` is the number of models of its own that it may have loaded, `max_memory_bytes` the memory that their
    weights and KV caches may take; None without a limit.
    """

    tenant: str
    owner: str
    is_admin: bool
    max_models: float | None = None
    max_memory_bytes: float | None = None

    @property
    def sees(self) -> str | None:
        """The tenant whose objects it may see, besides those of all tenants; None for an admin, who sees all."""
        return None if self.is_admin else self.tenant

    def require_admin(self, what: str) -> None:
        """Raise `PermissionDenied` unless the caller is an admin."""
        if not self.is_admin:
            raise PermissionDenied(f"{what} is for admins; this token has the role user", role="user")


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller of the current task; None if the server requires no token, and every caller is an admin."""


class Charge:
    """The tokens of one call that count towards the limit of its tenant.

    `reserve` counts the most that a call may use before it computes anything, so that no other call passes meanwhile;
    the gateway calls `settle` when the call ends, however it ends, and only what it used counts from then on.
    """

    def __init__(self, count: Callable[[int], None] | None = None) -> None:
        self._count = count
        self._reserved = 0
        self.prompt_tokens = 0
        """Tokens of the prompts: an estimate until the handler knows their number."""
        self.new_tokens = 0
        """Tokens generated so far."""

    def reserve(self, prompt_tokens: int, new_tokens: int = 0) -> None:
        """Count the tokens of the prompts, and the most tokens that may be generated."""
        self.prompt_tokens, self._reserved = prompt_tokens, prompt_tokens + new_tokens
        if self._count is not None:
            self._count(self._reserved)

    def settle(self) -> None:
        """Count what was used in place of what was reserved."""
        if self._count is not None:
            self._count(self.prompt_tokens + self.new_tokens - self._reserved)


CHARGE: ContextVar[Charge | None] = ContextVar("charge", default=None)
"""The charge of the current task's call; None outside a gateway."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: its request id, and its deadline on the clock of `time.monotonic()` in seconds, or None.

    `tenant` is the tenant of the caller's bearer token; empty without one. If the server requires no token, it is
    derived from whatever token the caller sends, and nothing has an owner.
    """

    request_id: str
    deadline: float | None
    tenant: str = ""
    caller: Caller = Caller(tenant="", owner="", is_admin=True)
    charge: Charge = field(default_factory=Charge)
    """What the call counts towards the limit of the tenant's tokens."""

    def remaining(self) -> float | None:
        """Seconds until the deadline, negative after it; None without one. Send this, not `deadline`, to processes."""
        return None if self.deadline is None else self.deadline - time.monotonic()


def call_of(context: Context) -> Call:
    """The call to which a gRPC context belongs."""
    remaining: float | None = context.time_remaining()  # None without a deadline; the type stubs omit it
    deadline = None if remaining is None else time.monotonic() + remaining
    caller = CALLER.get() or Caller(tenant=tenant_of(context), owner="", is_admin=True)
    charge = CHARGE.get() or Charge()
    return Call(
        request_id=request_id_of(context), deadline=deadline, tenant=caller.tenant, caller=caller, charge=charge
    )


def tenant_of(context: Context) -> str:
    """A name that is the same for all calls with the same bearer token; empty without a token."""
    given = authorization_in(context.invocation_metadata())
    return _name(given[0]) if given else ""


def authorization_in(metadata: Any) -> list[str]:
    """The values of `authorization` in a call's metadata, which may be None."""
    return [str(value) for key, value in metadata or () if key == AUTHORIZATION]


def tenant_named(token: str) -> str:
    """The tenant name of a bearer token to which the token file gives no name."""
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
    """The context of a call from this process, not over gRPC: the part of the gRPC context that interceptors use.

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
        """Store the trailing metadata of the call."""
        self._trailing = tuple(metadata)

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The trailing metadata of the call."""
        return self._trailing

    def set_code(self, code: Any) -> None:
        """Set the status code of the call."""
        self._code = code

    def code(self) -> Any:
        """The status code of the call; None if it was not set."""
        return self._code

    def set_details(self, details: str) -> None:
        """Set the message of the status."""
        self._details = details

    def details(self) -> str:
        """The message of the status."""
        return self._details

    def peer(self) -> str:
        """The origin of the call: this process."""
        return LOCAL

    def auth_context(self) -> dict[str, Any]:
        """The TLS properties of the caller: empty, as the call uses no connection."""
        return {}

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call, for a handler that did not raise an `AttnError`.

        Raises `Incompatible` with the details for UNIMPLEMENTED, else `InternalError`.
        """
        del trailing_metadata
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise Incompatible(details, code=code.name)
        raise InternalError(details or code.name, code=code.name)
