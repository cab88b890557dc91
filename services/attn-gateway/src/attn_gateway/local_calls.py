"""Calls of a gateway's services from its own process, through the same interceptors as calls over the wire.

Other front ends, such as HTTP, use these: tokens, tenants, request ids, readiness, draining, logs and errors work as
over gRPC, but no message is serialised.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import grpc
import grpc.aio
from attn_core.errors import DeadlineExceeded, Incompatible, InternalError
from google.protobuf.message import Message

from attn_gateway.call import LocalContext
from attn_gateway.interceptors.chain import Chain
from attn_gateway.interceptors.handlers import Handler, behaviour_of

Metadata = Sequence[tuple[str, str]]
"""Pairs of a lower-case key and a value, as in gRPC."""


class _CallDetails(NamedTuple):
    """The `grpc.HandlerCallDetails` of a call from this process."""

    method: str
    invocation_metadata: Metadata


class RecordingServer:
    """Registers handlers with a gRPC server, and stores them by the full name of their method."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.handlers: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """See `grpc.aio.Server`."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Handler]) -> None:
        """See `grpc.aio.Server`."""
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})
        self._server.add_registered_method_handlers(service, handlers)


class LocalCalls:
    """The methods of a gateway's services as functions of this process.

    Deadlines are on the clock of `time.monotonic()`, which is also the event loop's, in seconds.
    Calls raise errors of `attn_core.errors`; any other error of a handler becomes an `InternalError` with the request
    id, and its traceback is logged. Cancelling a call cancels its handler, as when a client disconnects.
    """

    def __init__(self, handlers: dict[str, Handler], interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self._handlers = handlers
        self._chain = Chain(interceptors)

    @property
    def methods(self) -> frozenset[str]:
        """The full names of all methods, such as "/attn.v1.ModelService/ListModels"."""
        return frozenset(self._handlers)

    def streams(self, method: str) -> bool:
        """Whether a method returns a stream of messages."""
        return bool(self._handlers[method].response_streaming)

    async def unary(self, method: str, request: Message, metadata: Metadata, deadline: float | None = None) -> Any:
        """Call a method with a single response; raises `DeadlineExceeded` at `deadline`."""
        context = LocalContext(metadata, deadline)
        behaviour = await self._behaviour(method, metadata)
        try:
            async with asyncio.timeout_at(deadline):
                if not inspect.isasyncgenfunction(behaviour):
                    return await behaviour(request, context)
                async with aclosing(behaviour(request, context)) as answers:
                    async for answer in answers:
                        return answer
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the call was answered") from error
        raise InternalError(f"{method} ended without an answer")

    async def stream(
        self, method: str, request: Message, metadata: Metadata, deadline: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """Call a method with a stream of responses; `deadline` is only passed to its handler."""
        context = LocalContext(metadata, deadline)
        behaviour = await self._behaviour(method, metadata)
        async with aclosing(behaviour(request, context)) as answers:
            async for answer in answers:
                yield answer

    async def _behaviour(self, method: str, metadata: Metadata) -> Callable[..., Any]:
        """The function that answers a call, wrapped by all interceptors."""
        details: Any = _CallDetails(method, metadata)

        async def innermost(_: Any) -> Handler | None:
            return self._handlers.get(method)

        handler = await self._chain.intercept_service(innermost, details)
        if handler is None:
            raise Incompatible(f"this server does not implement the method {method}", method=method)
        return behaviour_of(handler)
