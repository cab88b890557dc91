"""Gives every call an id, tells it to the client and puts it into every line of the log."""

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
"""The longest id taken from a client, in characters."""


class RequestIds(grpc.aio.ServerInterceptor):
    """Takes `x-request-id` from the call, or makes one, and returns it in the trailing metadata."""

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Put the id around the handler."""
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            request_id = _given(context) or uuid.uuid4().hex
            context.set_trailing_metadata(((REQUEST_ID, request_id),))
            # Every call runs in a task of its own, so this is not undone: closing a stream can happen in another task.
            structlog.contextvars.bind_contextvars(request_id=request_id, method=method)
            yield

        return around(handler, guard)


def _given(context: Context) -> str | None:
    """The client's id, if it is one that may stand in a log: printable, without spaces, not too long."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID and isinstance(value, str):
            fits = 0 < len(value) <= LONGEST and value.isascii() and value.isprintable() and " " not in value
            return value if fits else None
    return None
