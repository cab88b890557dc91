"""A call: its caller, tenant, request id, deadline, and the tokens that it counts."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from attn_core.errors import PermissionDenied

REQUEST_ID = "x-request-id"
"""Metadata key of the request id: in the request the client's choice, in the trailing metadata the one used."""
LONGEST_ID = 128
"""The longest request id accepted from a client, in characters."""

AUTHORIZATION = "authorization"
"""Metadata key of the bearer token."""

LOCAL = "local"
"""The peer name of calls from this process."""

Metadata: TypeAlias = Sequence[tuple[str, Any]]
"""Pairs of a lower-case key and a value, as in gRPC."""


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


NOBODY: Final = Caller(tenant="", owner="", is_admin=False)
"""The caller of a call whose token was not checked."""
SERVER: Final = Caller(tenant="", owner="", is_admin=True)
"""The server itself, as the caller of its own services."""


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

    def waive(self) -> None:
        """Count nothing for a call that was refused before anything was computed."""
        self.prompt_tokens = self.new_tokens = 0

    def settle(self) -> None:
        """Count what was used in place of what was reserved."""
        if self._count is not None:
            self._count(self.prompt_tokens + self.new_tokens - self._reserved)


class Rate(NamedTuple):
    """What is left of a limit a minute: how much may be used now, and the seconds until all of it may be."""

    limit: float
    remaining: int
    reset_seconds: float


@dataclass(kw_only=True)
class Call:
    """One call: its request id, and its deadline on the clock of `time.monotonic()` in seconds, or None.

    The gateway's policies set `caller` and `charge`; before, nothing is allowed and nothing is counted.
    """

    request_id: str
    deadline: float | None = None
    metadata: Metadata = field(default=(), repr=False)
    peer: str = LOCAL
    caller: Caller = NOBODY
    charge: Charge = field(default_factory=Charge)
    """What the call counts towards the limit of the tenant's tokens."""
    request: Any = field(default=None, repr=False)
    """The request, as a message until it is decoded; None before it is read."""
    observe: Callable[[Any], None] | None = None
    """Called with each response of a stream."""
    counted: bool = False
    """Whether it belongs to a request of the tenant that was counted by an earlier call."""
    rates: Callable[[], Mapping[str, Rate]] = dict
    """What is left now of the tenant's limits of "requests" and "tokens", of those that it has."""

    @property
    def tenant(self) -> str:
        """The tenant of the caller's bearer token; empty without one.

        If the server requires no token, it is derived from whatever token the caller sends, and nothing has an owner.
        """
        return self.caller.tenant

    def remaining(self) -> float | None:
        """Seconds until the deadline, negative after it; None without one. Send this, not `deadline`, to processes."""
        return None if self.deadline is None else self.deadline - time.monotonic()


def tenant_of(metadata: Metadata) -> str:
    """A name that is the same for all calls with the same bearer token; empty without a token."""
    given = authorization_in(metadata)
    return _name(given[0]) if given else ""


def authorization_in(metadata: Metadata | None) -> list[str]:
    """The values of `authorization` in a call's metadata, which may be None."""
    return [str(value) for key, value in metadata or () if key == AUTHORIZATION]


def tenant_named(token: str) -> str:
    """The tenant name of a bearer token to which the token file gives no name."""
    return _name(f"Bearer {token}")


def _name(given: str) -> str:
    return hashlib.blake2b(given.encode(), digest_size=16).hexdigest()


def request_id_in(metadata: Metadata) -> str:
    """The client's `x-request-id` if it is safe to log (printable ASCII, no spaces, not too long); else a new id."""
    for key, value in metadata:
        if key == REQUEST_ID:
            given = value if isinstance(value, str) else ""
            fits = 0 < len(given) <= LONGEST_ID and given.isascii() and given.isprintable() and " " not in given
            return given if fits else uuid.uuid4().hex
    return uuid.uuid4().hex
