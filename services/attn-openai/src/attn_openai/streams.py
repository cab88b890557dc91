"""Responses: JSON bodies, and streams that end with an error, or when the client has disconnected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeAlias

import msgspec
import structlog
from attn_core.errors import AttnError, InternalError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attn_openai.errors import body_of, headers_of, status_of

log = structlog.get_logger()

Events: TypeAlias = AsyncGenerator[dict[str, Any], None]
Fault: TypeAlias = Callable[[AttnError], dict[str, Any]]
"""Makes the body of an error response, in one of the formats."""


class CallerGoneError(Exception):
    """The client has disconnected before the response."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_response(error: AttnError, fault: Fault = body_of) -> Response:
    """A response with an error, by default in OpenAI's format."""
    return json_response(fault(error), status_of(error), headers_of(error))


def shown_error(error: Exception, request_id: str) -> AttnError:
    """The error that a client may see: an `AttnError` as it is; others are logged, and only the request id is shown."""
    if isinstance(error, AttnError):
        return error
    log.error("request failed", exc_info=error)
    return InternalError(f"internal error, request id {request_id}", request_id=request_id)


async def gone(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`; if the client disconnects, cancels it and raises `CallerGoneError`."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerGoneError
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class JsonLines:
    """An ASGI response that streams events as lines of JSON; it ends their source when the client disconnects.

    An error before the first event, such as that of an invalid request, gets an HTTP error status; a later one becomes
    the last event. All events are generated in one task, as calls set context variables of their task.
    """

    media_type = "application/x-ndjson"
    end = b""

    def __init__(self, events: Events, request_id: str, fault: Fault = body_of) -> None:
        self._events = events
        self._request_id = request_id
        self._sent = 0
        self.fault = fault

    def piece(self, value: dict[str, Any]) -> bytes:
        """Encode an event."""
        return msgspec.json.encode(value) + b"\n"

    def failure(self, error: AttnError) -> dict[str, Any]:
        """The event that reports an error to the client."""
        return self.fault(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as an ASGI application."""
        with contextlib.suppress(CallerGoneError):
            await unless_gone(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            try:
                value = await anext(self._events, None)
                first = b"" if value is None else self.piece(value)
            except Exception as error:  # noqa: BLE001 - the last place that can answer it
                response = error_response(shown_error(error, self._request_id), self.fault)
                await response(scope, receive, send)
                return
            await self._send(first, send)

    async def _send(self, first: bytes, send: Send) -> None:
        headers = [
            (b"content-type", self.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            self._sent = 1
            async for event in self._events:
                await send({"type": "http.response.body", "body": self.piece(event), "more_body": True})
                self._sent += 1
        except Exception as error:  # noqa: BLE001 - a stream must not end as if it were whole
            failure = self.piece(self.failure(shown_error(error, self._request_id)))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        await send({"type": "http.response.body", "body": self.end, "more_body": False})


class Chunks(JsonLines):
    """Server-sent events without names, with an end of their own, as OpenAI's completions have them."""

    media_type = "text/event-stream; charset=utf-8"
    end = b"data: [DONE]\n\n"

    def piece(self, value: dict[str, Any]) -> bytes:
        """Encode an event."""
        return b"data: " + msgspec.json.encode(value) + b"\n\n"


class NamedEvents(Chunks):
    """Server-sent events that are named by their type, as /v1/responses and Anthropic's messages have them."""

    end = b""

    def piece(self, value: dict[str, Any]) -> bytes:
        """Encode an event."""
        return f"event: {value['type']}\n".encode() + super().piece(value)

    def failure(self, error: AttnError) -> dict[str, Any]:
        """The event of the type `error`; OpenAI's clients raise an exception if it has the key `error`."""
        body = self.fault(error)
        facts = {name: body["error"][name] for name in ("code", "message", "param") if name in body["error"]}
        return {"sequence_number": self._sent, **facts, **body, "type": "error"}
