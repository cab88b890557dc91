"""The HTTP application: routes, request bodies with limits, responses, streams, and cancellation on disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from importlib.metadata import version
from typing import Any, TypeAlias

import msgspec
import structlog
from attn_core.errors import AttnError, InternalError, InvalidValue, Unavailable, UnknownName, UserError
from attn_gateway import ServingState
from attn_gateway.call import request_id_in
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from attn_openai import chat, completions, responses, transcoding
from attn_openai.answers import AnswerStore
from attn_openai.anthropic_messages import MessagesRequest, count_tokens, make_message, stream_message
from attn_openai.caller import HttpCaller
from attn_openai.errors import SlowRequestError, body_of, headers_of, status_of
from attn_openai.pages import PAGE_PATHS, Pages
from attn_openai.requests import ChatCompletionRequest, CompletionRequest, EmbeddingsRequest, ResponseRequest

log = structlog.get_logger()

BODY_SECONDS = 30.0
"""How long a client may take to send the body of a request."""
PATHS = {
    "POST /v1/chat/completions": "The next message of a conversation, with tools, structured output and streaming.",
    "POST /v1/completions": "Completions of texts or token ids; with echo their log probabilities.",
    "POST /v1/responses": "Like chat completions, in the format of OpenAI's Responses API.",
    "POST /v1/messages": "Like chat completions, in the format of Anthropic's Messages API.",
    "POST /v1/messages/count_tokens": "The length of the prompt of a message.",
    "POST /v1/embeddings": "A vector for each text, by an encoder.",
    "POST /tokenize": "The token ids of a text or a conversation.",
    "POST /detokenize": "The text of token ids.",
    "GET /v1/models": "The models that are loaded.",
    "GET /v1/models/{name:path}": "One model.",
    "GET /metrics": "The metrics for Prometheus; needs a token if the server has tokens.",
    "GET /openapi.json": "The OpenAPI document of this interface; needs no token.",
    "GET /docs": "The same as an HTML page; needs no token.",
    "GET /health": "200 while all services are ready, else 503; needs no token.",
    "GET /version": "The version of this package; needs no token.",
}
"""The method and path of each supported part of OpenAI's and vLLM's interfaces, with its description."""

BEARER = re.compile(r"^bearer +", re.IGNORECASE)
"""The scheme of a token, in which HTTP does not distinguish capitals."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

CALL_PATH = "/{service}/{method}"
"""The path of a gRPC call."""

DONE = b"data: [DONE]\n\n"

REQUESTS: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": MessagesRequest,
    "/v1/embeddings": EmbeddingsRequest,
}
"""The types of request bodies, by path."""

Answer: TypeAlias = Callable[[Any, HttpCaller], Coroutine[Any, Any, dict[str, Any]]]
Stream: TypeAlias = Callable[[Any, HttpCaller], AsyncGenerator[dict[str, Any], None]]


class CallerGoneError(Exception):
    """The client has disconnected before the response."""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_response(error: AttnError) -> Response:
    """A response with an error in OpenAI's format."""
    return json_response(body_of(error), status_of(error), headers_of(error))


def event_of(value: dict[str, Any]) -> bytes:
    """A value as a server-sent event; events of /v1/responses have a type."""
    data = b"data: " + msgspec.json.encode(value) + b"\n\n"
    kind = value.get("type")
    return f"event: {kind}\n".encode() + data if isinstance(kind, str) else data


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


class EventStream:
    """An ASGI response that streams events; it ends their source when the client disconnects, and sends errors.

    An error before the first event, such as that of an invalid request, gets an HTTP error status; a later one becomes
    the last event. All events are generated in one task, as calls set context variables of their task.
    """

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], request_id: str, *, done: bool = False) -> None:
        self._events = events
        self._request_id = request_id
        self._done = done
        self._sent = 0

    def piece(self, value: dict[str, Any]) -> bytes:
        """Encode an event."""
        self._sent += 1
        return event_of(value)

    def failure(self, error: AttnError) -> dict[str, Any]:
        """The event that reports an error to the client: clients raise an exception if it has the key `error`."""
        body = body_of(error)
        if self._done:
            return body
        facts = {name: body["error"][name] for name in ("code", "message", "param")}
        return {"type": "error", "sequence_number": self._sent, **facts, **body}

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
                await error_response(shown_error(error, self._request_id))(scope, receive, send)
                return
            await self._send(first, send)

    async def _send(self, first: bytes, send: Send) -> None:
        headers = [
            (b"content-type", self.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self._request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": self.piece(event), "more_body": True})
        except Exception as error:  # noqa: BLE001 - a stream must not end as if it were whole
            failure = self.piece(self.failure(shown_error(error, self._request_id)))
            await send({"type": "http.response.body", "body": failure, "more_body": True})
        await send({"type": "http.response.body", "body": DONE if self._done else b"", "more_body": False})


class LineStream(EventStream):
    """A stream of JSON lines."""

    media_type = "application/x-ndjson"

    def piece(self, value: dict[str, Any]) -> bytes:
        """Encode one line."""
        return msgspec.json.encode(value) + b"\n"

    def failure(self, error: AttnError) -> dict[str, Any]:
        """The JSON line that reports an error to the client."""
        return body_of(error)


def timeout_of(request: Request) -> float | None:
    """The timeout in seconds from the Connect protocol's header, None without; raises `InvalidValue`."""
    given = request.headers.get("connect-timeout-ms")
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and 0 < int(given[:12]) < 10**10):
        raise InvalidValue.of("connect-timeout-ms", given, "a whole number of milliseconds above 0")
    return int(given) / 1000


def shown_error(error: Exception, request_id: str) -> AttnError:
    """The error that a client may see: an `AttnError` as it is; others are logged, and only the request id is shown."""
    if isinstance(error, AttnError):
        return error
    log.error("request failed", exc_info=error)
    return InternalError(f"internal error, request id {request_id}", request_id=request_id)


class HttpApplication:
    """The Starlette application in front of one gateway."""

    def __init__(self, gateway: ServingState) -> None:
        self._gateway = gateway
        self._caches: dict[str, Any] = {"kv_tokens": {}, "templates": {}, "answers": AnswerStore()}
        self.app = Starlette(routes=self._routes(), exception_handlers={HTTPException: _unknown_path})

    def _routes(self) -> list[Route]:
        answers = {
            "POST /v1/chat/completions": self._text(ChatCompletionRequest, chat.complete_chat, chat.stream_chat),
            "POST /v1/completions": self._text(CompletionRequest, completions.complete, completions.stream_completions),
            "POST /v1/responses": self._text(ResponseRequest, responses.respond, responses.stream_response, done=False),
            "POST /v1/messages": self._text(MessagesRequest, make_message, stream_message, done=False),
            "POST /v1/messages/count_tokens": self._text(MessagesRequest, count_tokens),
            "POST /v1/embeddings": self._text(EmbeddingsRequest, completions.embed),
            "POST /tokenize": self._plain(completions.tokenize),
            "POST /detokenize": self._plain(completions.detokenize),
            "GET /v1/models": self._guarded(self._models),
            "GET /v1/models/{name:path}": self._guarded(self._model),
            "GET /metrics": self._guarded(self._metrics),
            "GET /openapi.json": self._openapi,
            "GET /docs": self._docs,
            "GET /health": self._health,
            "GET /version": self._version,
        }
        pages = Pages(self._body)
        answers |= {
            "GET /": pages.home,
            "GET /ui": pages.home,
            "POST /ui/data/mechanism": self._guarded(self._page_data(pages.mechanism)),
            "POST /ui/data/check": self._guarded(self._page_data(pages.check)),
            "GET /ui/{path:path}": pages.file,
        }
        named = [Route(key.split()[1], answers[key], methods=[key.split()[0]]) for key in PATHS | PAGE_PATHS]
        return [*named, Route(CALL_PATH, self._guarded(self._call), methods=["POST"])]

    def _text(self, kind: Any, answer: Answer, stream: Stream | None = None, *, done: bool = True) -> Any:
        """An endpoint for requests of type `kind`, which responds with one body, or a stream if `stream` is set."""

        async def handle(request: Request, caller: HttpCaller) -> Any:
            body = kind.read(await self._body(request))
            structlog.contextvars.bind_contextvars(**({"user": body.user} if body.user else {}))
            timed = caller.until(body.timeout)
            if stream is None or not body.stream:
                return json_response(await unless_gone(request.receive, answer(body, timed)))
            return EventStream(stream(body, timed), caller.request_id, done=done)

        return self._guarded(handle)

    def _plain(self, answer: Answer) -> Any:
        """An endpoint for requests of a few fields, which `answer` validates itself."""

        async def handle(request: Request, caller: HttpCaller) -> Any:
            return json_response(await unless_gone(request.receive, answer(await self._body(request), caller)))

        return self._guarded(handle)

    @staticmethod
    def _page_data(answer: Callable[[Request, HttpCaller], Coroutine[Any, Any, Any]]) -> Any:
        async def handle(request: Request, caller: HttpCaller) -> Response:
            return json_response(await unless_gone(request.receive, answer(request, caller)))

        return handle

    def _guarded(self, handle: Callable[[Request, HttpCaller], Awaitable[Any]]) -> Any:
        """An endpoint that responds with the result of `handle`, or with the error that it raises."""

        async def endpoint(request: Request) -> Any:
            request_id = request_id_in(request.headers.items())
            # These must be bound here: a stream is sent by other tasks, which inherit the present context variables.
            structlog.contextvars.bind_contextvars(request_id=request_id, path=request.url.path)
            try:
                self._check_host(request)
                caller = self._caller(request, request_id)
                self._gateway.require_token(caller.metadata)  # before the body, which nobody else may make us read
                response = await handle(request, caller)
            except CallerGoneError:
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - the last place that can answer it
                response = error_response(shown_error(error, request_id))
            if isinstance(response, Response):
                response.headers["x-request-id"] = request_id
            return response

        return endpoint

    def _caller(self, request: Request, request_id: str) -> HttpCaller:
        metadata = [("x-request-id", request_id)]
        for name in ("authorization", "traceparent", "tracestate"):
            metadata += [(name, BEARER.sub("Bearer ", value)) for value in request.headers.getlist(name)]
        if "authorization" not in request.headers and "x-api-key" in request.headers:  # as Anthropic's clients send it
            metadata.append(("authorization", f"Bearer {request.headers['x-api-key']}"))
        return HttpCaller(self._gateway.calls, tuple(metadata), request_id, **self._caches)

    def _check_host(self, request: Request) -> None:
        """Refuse foreign host names on a server without tokens, against DNS rebinding by web pages."""
        settings = self._gateway.settings
        has_tokens = settings.tokens or settings.token_file
        if has_tokens or settings.insecure or is_own_host(request.url.hostname or ""):
            return
        raise InvalidValue.of("host", request.url.hostname, "localhost or an IP address, on a server without tokens")

    async def _body(self, request: Request) -> dict[str, Any]:
        """Read and decode the body; raises `UserError` if it is too long, too slow, or not a JSON object."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Pages of other sites can send other content types without a CORS preflight request.
            raise InvalidValue.of("content-type", kind, "application/json")
        limit, parts, size = self._gateway.settings.max_request_bytes, [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise InvalidValue.of("body", f"more than {limit} bytes", f"at most {limit} bytes")
                    parts.append(part)
        except TimeoutError:
            raise SlowRequestError(f"the body was not received within {BODY_SECONDS:g} seconds", field="body") from None
        try:
            values = msgspec.json.decode(b"".join(parts))
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise UserError(f"the body is not JSON: {error}", field="body") from None
        if not isinstance(values, dict):
            raise InvalidValue.of("body", type(values).__name__, "a JSON object")
        return values

    async def _models(self, request: Request, caller: HttpCaller) -> Response:
        return json_response(await unless_gone(request.receive, completions.models(caller)))

    async def _model(self, request: Request, caller: HttpCaller) -> Response:
        return json_response(completions.model_of(await caller.model(request.path_params["name"])))

    async def _call(self, request: Request, caller: HttpCaller) -> Any:
        """Answer a gRPC call in JSON."""
        if "." not in request.path_params["service"]:
            raise UnknownName.of("path", request.url.path, [key.split()[1] for key in PATHS])
        row = transcoding.row_of(**request.path_params, calls=self._gateway.calls)
        message = transcoding.read_message(row.request, await self._body(request))
        lists = request.query_params.get("tensors") == transcoding.LISTS
        timed = caller.until(timeout_of(request))
        if not row.streams:
            return json_response(await unless_gone(request.receive, transcoding.call(row, message, timed, lists=lists)))
        return LineStream(transcoding.stream(row, message, timed, lists=lists), caller.request_id)

    def _document(self) -> Any:
        return transcoding.openapi(self._gateway.calls, PATHS | PAGE_PATHS, REQUESTS, version("attn-openai"))

    async def _openapi(self, _: Request) -> Response:
        return json_response(self._document())

    async def _docs(self, _: Request) -> Response:
        return Response(transcoding.page(self._document()), media_type="text/html")

    async def _metrics(self, _: Request, caller: HttpCaller) -> Response:
        return Response(await self._gateway.metrics(caller.metadata), media_type=METRICS_TYPE)

    async def _health(self, _: Request) -> Response:
        if self._gateway.serving:
            return Response(status_code=200)
        return error_response(Unavailable("the server is starting or shutting down"))

    async def _version(self, _: Request) -> Response:
        return json_response({"version": version("attn-openai")})


def is_own_host(name: str) -> bool:
    """Whether a host name cannot belong to a web site: localhost or an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


async def _unknown_path(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    named = [route for route in routes if route.path != CALL_PATH]
    if status == 404 or not any(route.path_regex.match(request.url.path) for route in named):
        paths = [route.path for route in named if not route.path.startswith("/ui")]
        return error_response(UnknownName.of("path", request.url.path, paths))
    headers = error.headers if isinstance(error, HTTPException) else None  # Allow, with 405
    body = body_of(UserError(f"{request.method} is not allowed for {request.url.path}"))
    return json_response(body, status, dict(headers or {}))
