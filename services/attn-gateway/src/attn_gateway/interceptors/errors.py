"""Turns exceptions into canonical codes with details; of an unexpected error a client gets only the request id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import structlog

from attn_gateway.call import REQUEST_ID, Context, LocalContext, request_id_of
from attn_gateway.interceptors.handlers import Continuation, Handler, around
from attn_gateway.status import DETAILS_KEY, MESSAGE_BYTES, code_of, public_error, shortened, status_of

log = structlog.get_logger()

UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNIMPLEMENTED.value[0])
"""The code, as enum and as number, that the generated base class sets before it raises for an unimplemented call."""


class Errors(grpc.aio.ServerInterceptor):
    """Ends a call with the status of the error that its handler raised."""

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Wrap the handler with the translation of errors."""
        handler = await continuation(details)
        return None if handler is None else around(handler, _guard)


@asynccontextmanager
async def _guard(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:  # noqa: BLE001 - the last place that can keep it from the client
        await _abort(context, error)


async def _abort(context: Context, error: Exception) -> None:
    if isinstance(error, NotImplementedError) and context.code() in UNIMPLEMENTED:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not implement this method")
    request_id = request_id_of(context)
    shown = public_error(error, request_id)
    code = code_of(shown)
    if code is grpc.StatusCode.INTERNAL:
        log.error("call failed", exc_info=error)
    caller: object = context
    if isinstance(caller, LocalContext):
        # A call from this process gets the exception itself.
        raise shown
    metadata = ((REQUEST_ID, request_id), (DETAILS_KEY, status_of(shown).SerializeToString()))
    await context.abort(code, shortened(shown.message, MESSAGE_BYTES), trailing_metadata=metadata)
