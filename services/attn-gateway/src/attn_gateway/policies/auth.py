"""Who may call, and the record of who changed what: bearer tokens and the audit log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from attn_core.errors import AttnError, Unauthenticated
from attn_schema.methods import Row

from attn_gateway.call import Call, Caller, Metadata, authorization_in, tenant_of
from attn_gateway.logs import report
from attn_gateway.status import code_of, shortened
from attn_gateway.tenants import Tenants

log = structlog.get_logger("audit")

REFUSAL = "this server requires the metadata 'authorization: Bearer TOKEN' with a valid token"
NAMES = ("name", "job_id", "id", "source", "model")
"""The fields of requests that the audit log shows."""
NAME_BYTES = 200


class BearerToken:
    """Finds the caller of each call; if there are tenants, requires one of their tokens."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def caller(self, metadata: Metadata) -> Caller:
        """The caller whose token this metadata has; raises `Unauthenticated` without a valid one.

        If the server has no tokens, every caller is an admin.
        """
        if not self._tenants:
            return Caller(tenant=tenant_of(metadata), owner="", is_admin=True)
        found = self._tenants.of(authorization_in(metadata))
        if found is None:
            raise Unauthenticated(REFUSAL)
        if found.is_admin:
            return Caller(tenant=found.name, owner=found.name, is_admin=True)
        limits = {"max_models": found.max_models, "max_memory_bytes": found.max_memory_bytes}
        return Caller(tenant=found.name, owner=found.name, is_admin=False, **limits)

    @asynccontextmanager
    async def __call__(self, _: Row, call: Call) -> AsyncIterator[None]:
        """Run a call as the caller of its token."""
        call.caller = self.caller(call.metadata)
        yield


@asynccontextmanager
async def audit(row: Row, call: Call) -> AsyncIterator[None]:
    """Write a line to the audit log when a call that changes something ends, without prompts and configs."""
    if not row.changes:
        yield
        return
    result = "CANCELLED"
    try:
        yield
        result = "OK"
    except Exception as error:
        result = code_of(error).name if isinstance(error, AttnError) else "INTERNAL"
        raise
    finally:
        values = ((name, getattr(call.request, name, None)) for name in NAMES)
        named = {name: shortened(str(value), NAME_BYTES) for name, value in values if value}
        role = "admin" if call.caller.is_admin else "user"
        facts = {"tenant": call.tenant, "role": role, "peer": call.peer, "call": call.request_id}
        report(log, "audit", action=row.name, result=result, **facts, **named)
