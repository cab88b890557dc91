"""Decoding and encoding of messages: bytes that are not the expected message are refused as the client's error."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from attn_core.errors import UserError

from attn_gateway.call import Context
from attn_gateway.interceptors.handlers import Continuation, Handler, behaviour_of, rebuild

LARGE_BYTES = 64 * 1024
"""Larger requests are decoded, and their responses encoded, in a thread; millions of tokens would block all calls."""


class InvalidMessage(UserError):  # noqa: N818 - named as its family in attn_core.errors
    """The request's bytes are not the protobuf message that the method expects."""

    reason = "INVALID_MESSAGE"


@dataclass(frozen=True)
class _Undecodable:
    """The placeholder for a request that could not be decoded, which the handler refuses."""

    method: str

    def refuse(self) -> InvalidMessage:
        text = f"the request of {self.method} is not a valid message: wrong bytes, or text that is not UTF-8"
        return InvalidMessage(text, method=self.method)


class Wire(grpc.aio.ServerInterceptor):
    """Answers undecodable requests with INVALID_ARGUMENT; gRPC alone returns UNKNOWN and exposes the Python error.

    gRPC decodes before any interceptor can catch errors, so the decoder returns a mark and the handler refuses it.
    """

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Wrap the decoder to mark undecodable requests, and the handler to refuse marked requests."""
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None or handler.response_serializer is None:
            return handler
        decode = _decoder(handler.request_deserializer, _Undecodable(details.method))
        encode = _encoder(handler.response_serializer)
        return rebuild(handler, _refusing(handler, handler.response_serializer), deserializer=decode, serializer=encode)


def _decoder(decode: Callable[[bytes], Any], mark: _Undecodable) -> Callable[[bytes], Any]:
    def decode_or_mark(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception:  # noqa: BLE001 - protobuf's back ends differ in what they raise
            return mark

    return decode_or_mark


def _encoder(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def encode_unless_done(response: Any) -> bytes:
        return response if isinstance(response, bytes) else encode(response)

    return encode_unless_done


def _refusing(handler: Handler, encode: Callable[[Any], bytes]) -> Callable[..., Any]:
    behaviour = behaviour_of(handler)

    def checked(request: Any) -> Any:
        if handler.request_streaming:
            return _checked_stream(request)
        if isinstance(request, _Undecodable):
            raise request.refuse()
        return request

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        async with aclosing(behaviour(checked(request), context)) as responses:
            async for response in responses:
                yield response

    async def single(request: Any, context: Context) -> Any:
        response = await behaviour(checked(request), context)
        if handler.request_streaming or request.ByteSize() <= LARGE_BYTES:
            return response
        return await asyncio.to_thread(encode, response)

    return stream if inspect.isasyncgenfunction(behaviour) else single


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Undecodable):
            raise request.refuse()
        yield request
