"""Gives every call a request id, which the client receives and every log line contains."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import structlog

from attn_gateway.call import REQUEST_ID, Context
from attn_gateway.interceptors.handlers import Continuation, Handler, around

LONGEST = 128
"""The longest id accepted from a client, in characters."""


class RequestIds(grpc.aio.ServerInterceptor):
    """Uses the `x-request-id` of the call, or creates an id, and returns it in the trailing metadata."""

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Wrap the handler so that the id is set for every call."""
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            request_id = _given(context) or uuid.uuid4().hex
            context.set_trailing_metadata(((REQUEST_ID, request_id),))
            # Every call has its own task, so this is not reset: a stream can be closed in another task.
            structlog.contextvars.bind_contextvars(request_id=request_id, method=method)
            yield

        return around(handler, guard)


def _given(context: Context) -> str | None:
    """The client's id, if it is safe to log (printable ASCII, no spaces, not too long); else None."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID and isinstance(value, str):
            fits = 0 < len(value) <= LONGEST and value.isascii() and value.isprintable() and " " not in value
            return value if fits else None
    return None
