"""Lets in only callers that give the bearer token."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from attn_core.errors import Unauthenticated

from attn_gateway.call import AUTHORIZATION, Context
from attn_gateway.interceptors.handlers import Continuation, Handler

HEALTH = "/grpc.health.v1.Health/"
REFUSAL = "this server wants the metadata 'authorization: Bearer TOKEN' with its token"


class BearerToken(grpc.aio.ServerInterceptor):
    """Asks every call for `authorization: Bearer TOKEN` with one of the tokens; health is open, as probes have none."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._expected = [f"Bearer {token}".encode() for token in tokens]

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Let the call in, or answer it with a refusal."""
        if details.method.startswith(HEALTH) or self.admits(details.invocation_metadata):
            return await continuation(details)
        # The kinds of calls look the same on the wire, and this one reads no request before it refuses.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def admits(self, metadata: Any) -> bool:
        """Whether this metadata gives one of the tokens."""
        given = [str(value).encode() for key, value in metadata or () if key == AUTHORIZATION]
        # All are compared, so that the time says nothing about which was near.
        return len(given) == 1 and sum(hmac.compare_digest(given[0], expected) for expected in self._expected) > 0


async def _refuse(_requests: Any, _context: Context) -> AsyncIterator[bytes]:
    for nothing in tuple[bytes]():
        yield nothing
    raise Unauthenticated(REFUSAL)
