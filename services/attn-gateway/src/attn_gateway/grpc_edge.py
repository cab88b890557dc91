"""The gRPC edge: every row as a gRPC method, whose messages are decoded and encoded here."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from attn_core.errors import AttnError, Unauthenticated
from attn_schema.methods import Row

from attn_gateway.call import REQUEST_ID, Call, request_id_in
from attn_gateway.calls import Calls, encoded
from attn_gateway.policies.auth import BearerToken
from attn_gateway.policies.measure import shown_error
from attn_gateway.status import DETAILS_KEY, MESSAGE_BYTES, code_of, shortened, status_of

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""The context that gRPC passes to a handler; generic only for type checkers."""
GrpcHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

HEALTH = "/grpc.health.v1.Health/"


class GrpcEdge(grpc.GenericRpcHandler):
    """Answers gRPC calls of all rows.

    Calls without a valid token are refused before their request is read, also those of reflection and of methods that
    do not exist; not those of health, as probes have no token.
    """

    def __init__(self, calls: Calls, token: BearerToken) -> None:
        self._calls = calls
        self._token = token
        self._handlers = {path: self._handler_of(row) for path, row in calls.rows.items()}

    def service(self, details: grpc.HandlerCallDetails) -> GrpcHandler | None:
        """Return the handler of a call, one that refuses it, or None if the method is not a row."""
        if not details.method.startswith(HEALTH):
            try:
                self._token.caller(details.invocation_metadata or ())
            except Unauthenticated as error:
                # All kinds of calls look the same on the wire, and this kind refuses before any request.
                row = self._calls.rows.get(details.method)
                return grpc.stream_stream_rpc_method_handler(partial(self._refuse, row, error))
        return self._handlers.get(details.method)

    def _handler_of(self, row: Row) -> GrpcHandler:
        # Without serializers gRPC passes bytes: requests are decoded where errors have a status.
        if row.streams:
            return grpc.unary_stream_rpc_method_handler(partial(self._stream, row))
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, row))

    async def _unary(self, row: Row, data: bytes, context: Context) -> bytes:
        call = _begin(context)
        try:
            return await encoded(row, await self._calls.unary(row, data, call), len(data))
        except Exception as error:  # noqa: BLE001 - the last place that can keep it from the client
            await _abort(context, call, error)

    async def _stream(self, row: Row, data: bytes, context: Context) -> None:
        call = _begin(context)
        try:
            async with aclosing(self._calls.stream(row, data, call)) as answers:
                async for answer in answers:
                    await context.write(await encoded(row, answer, len(data)))
        except Exception as error:  # noqa: BLE001 - the last place that can keep it from the client
            await _abort(context, call, error)

    async def _refuse(self, row: Row | None, error: Unauthenticated, _: AsyncIterator[bytes], context: Context) -> None:
        if row is None:
            await _abort(context, _begin(context), error)
        elif row.streams:
            await self._stream(row, b"", context)
        else:
            await self._unary(row, b"", context)


def _begin(context: Context) -> Call:
    metadata: Any = context.invocation_metadata() or ()
    call = Call(request_id=request_id_in(metadata), metadata=metadata, peer=str(context.peer()))
    context.set_trailing_metadata(((REQUEST_ID, call.request_id),))
    remaining: float | None = context.time_remaining()  # None without a deadline; the type stubs omit it
    call.deadline = None if remaining is None else time.monotonic() + remaining
    return call


async def _abort(context: Context, call: Call, error: Exception) -> NoReturn:
    """End a call with the canonical code and the details of an error."""
    shown = error if isinstance(error, AttnError) else shown_error(error, call.request_id)
    metadata = ((REQUEST_ID, call.request_id), (DETAILS_KEY, status_of(shown).SerializeToString()))
    await context.abort(code_of(shown), shortened(shown.message, MESSAGE_BYTES), trailing_metadata=metadata)
    raise shown
