"""Admits only calls with a valid bearer token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from attn_core.errors import Unauthenticated

from attn_gateway.call import CALLER, Caller, Context, authorization_in
from attn_gateway.interceptors.handlers import Continuation, Handler, around
from attn_gateway.tenants import Tenant, Tenants

HEALTH = "/grpc.health.v1.Health/"
REFUSAL = "this server requires the metadata 'authorization: Bearer TOKEN' with a valid token"


class BearerToken(grpc.aio.ServerInterceptor):
    """Requires `authorization: Bearer TOKEN` with one of the tokens in all calls but health, as probes have none."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def variant(self, details: grpc.HandlerCallDetails) -> Tenant | None:
        """The tenant of the call; None for a call that is refused."""
        return self._tenants.of(authorization_in(details.invocation_metadata))

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler, run as the tenant of the token, or a handler that refuses the call."""
        if details.method.startswith(HEALTH):
            return await continuation(details)
        tenant = self.variant(details)
        if tenant is None:
            # All kinds of calls look the same on the wire, and a stream-stream handler refuses before any request.
            return grpc.stream_stream_rpc_method_handler(_refuse)
        handler = await continuation(details)
        if handler is None:
            return None
        caller = _caller_of(tenant)

        @asynccontextmanager
        async def guard(_: Context) -> AsyncIterator[None]:
            # Every call has its own task, so this is not reset: a stream can be closed in another task.
            CALLER.set(caller)
            yield

        return around(handler, guard)

    def caller(self, metadata: Any) -> Caller:
        """The caller whose token this metadata has; raises `Unauthenticated` without a valid one."""
        found = self._tenants.of(authorization_in(metadata))
        if found is None:
            raise Unauthenticated(REFUSAL)
        return _caller_of(found)


def _caller_of(tenant: Tenant) -> Caller:
    if tenant.is_admin:
        return Caller(tenant=tenant.name, owner=tenant.name, is_admin=True)
    limits = {"max_models": tenant.max_models, "max_memory_bytes": tenant.max_memory_bytes}
    return Caller(tenant=tenant.name, owner=tenant.name, is_admin=False, **limits)


async def _refuse(_requests: Any, _context: Context) -> AsyncIterator[bytes]:
    for nothing in tuple[bytes]():
        yield nothing
    raise Unauthenticated(REFUSAL)
