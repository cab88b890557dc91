"""Helpers to wrap gRPC method handlers."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeAlias

import grpc

from attn_gateway.call import Context

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
Guard = Callable[[Context], AbstractAsyncContextManager[None]]

FACTORIES = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""The function that creates a handler, by whether its requests and its responses are streams."""


def behaviour_of(handler: Handler) -> Callable[..., Any]:
    """The function of a handler that answers calls."""
    functions = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(function for function in functions if function is not None)


def rebuild(
    handler: Handler,
    behaviour: Callable[..., Any],
    *,
    deserializer: Callable[[bytes], Any] | None = None,
    serializer: Callable[[Any], bytes] | None = None,
) -> Handler:
    """A handler of the same kind as `handler` with the function `behaviour`, and other codecs if given."""
    factory = FACTORIES[handler.request_streaming, handler.response_streaming]
    return factory(
        behaviour,
        request_deserializer=deserializer or handler.request_deserializer,
        response_serializer=serializer or handler.response_serializer,
    )


def around(handler: Handler, guard: Guard) -> Handler:
    """Wrap `handler` so that every call runs inside the context manager `guard(context)`."""
    behaviour = behaviour_of(handler)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        # Closing the inner generator now, not at garbage collection, ends the work of a cancelled call at once.
        async with guard(context), aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    async def single(request: Any, context: Context) -> Any:
        async with guard(context):
            return await behaviour(request, context)

    # A coroutine may also answer a streaming method, by `context.write`.
    return rebuild(handler, stream if inspect.isasyncgenfunction(behaviour) else single)


def is_own(method: str) -> bool:
    """Whether the method belongs to the gateway's own health or reflection service."""
    return method.startswith("/grpc.")
