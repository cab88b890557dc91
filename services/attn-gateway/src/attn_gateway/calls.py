"""The calls of a gateway: the handler of each row, inside the policies that hold for all of them.

gRPC, JSON over HTTP and OpenAI's interface are edges: they make a `Call`, pass the request, and write the responses in
their own format. Between them and the handlers there are only nouns.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, TypeAlias

import msgspec
from attn_core.errors import Incompatible
from attn_schema.codec import encode, from_message, parsed
from attn_schema.methods import METHODS, Method, Response, Row

from attn_gateway.call import Call

LARGE_BYTES = 64 * 1024
"""Larger requests are decoded, and their responses encoded, in a thread; millions of tokens would block all calls."""

Handler: TypeAlias = Callable[[Any, Call], Any]
"""`async def handler(request, call)`: a coroutine with the response, or an async generator of responses."""
Policy: TypeAlias = Callable[[Row, Call], AbstractAsyncContextManager[None]]
"""A context manager around the handler of a call; raises to refuse it."""
Request: TypeAlias = Any
"""The noun of a request, its message, or the bytes of its message."""


def handlers_of(service: str, target: object) -> dict[Row, Handler]:
    """The handlers of a service: the methods of `target` that are named as the calls of the service."""
    rows = [row for row in METHODS if row.service == service]
    return {row: getattr(target, row.function) for row in rows if hasattr(target, row.function)}


class Calls:
    """The calls that a server answers. `policies` are entered in order, so the first is the outermost.

    Cancelling a call, or closing its stream, cancels its handler.
    """

    def __init__(self, handlers: Mapping[Row, Handler], policies: Sequence[Policy] = ()) -> None:
        self._handlers = dict(handlers)
        self._policies = tuple(policies)
        self.rows: dict[str, Row] = {row.path: row for row in handlers}
        """The rows of all calls, by path."""

    async def unary(self, row: Method[Any, Response], request: Request, call: Call) -> Response:
        """Make a call with one response."""
        handler = self._handler(row)
        async with self._inside(row, call):
            answer: Response = await handler(await _read(row, request, call), call)
            return answer

    async def stream(self, row: Method[Any, Response], request: Request, call: Call) -> AsyncGenerator[Response, None]:
        """Make a call with a stream of responses."""
        handler = self._handler(row)
        async with self._inside(row, call), aclosing(handler(await _read(row, request, call), call)) as answers:
            async for answer in answers:
                if call.observe is not None:
                    call.observe(answer)
                yield answer

    def _handler(self, row: Row) -> Handler:
        handler = self._handlers.get(row)
        if handler is None:
            raise Incompatible(f"this server does not implement the method {row.path}", method=row.path)
        return handler

    @asynccontextmanager
    async def _inside(self, row: Row, call: Call) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for policy in self._policies:
                await stack.enter_async_context(policy(row, call))
            yield


async def _read(row: Row, request: Request, call: Call) -> Any:
    """The noun of a request; raises `InvalidMessage` or `InvalidValue`."""
    call.request = request
    if isinstance(request, row.request):
        return request
    message = parsed(row.request, request) if isinstance(request, bytes) else request
    call.request = message  # what is invalid is audited by its names, too
    if message.ByteSize() > LARGE_BYTES:
        call.request = await asyncio.to_thread(from_message, row.request, message)
    else:
        call.request = from_message(row.request, message)
    return call.request


async def encoded(row: Row, answer: msgspec.Struct, request_bytes: int) -> bytes:
    """The bytes of a response; in a thread if it may be large."""
    if not row.bulk and request_bytes <= LARGE_BYTES:
        return encode(answer)
    # Freeing millions of tokens in the event loop would block other calls, too.
    held = [answer]
    del answer
    return await asyncio.to_thread(lambda: encode(held.pop()))
