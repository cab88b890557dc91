"""The HTTP application: routes, request bodies with limits, responses, streams, and cancellation on disconnect."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

import msgspec
import structlog
from attn_core.errors import InvalidValue, Unavailable, UnknownName, UserError
from attn_gateway import ServingState
from attn_gateway.call import request_id_in
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from attn_openai import completions, ollama, transcoding
from attn_openai.answers import AnswerStore
from attn_openai.anthropic_messages import Message, MessagesRequest, count_tokens, error_body
from attn_openai.caller import HttpCaller
from attn_openai.chat import ChatCompletion
from attn_openai.errors import SlowRequestError, body_of
from attn_openai.pages import PAGE_PATHS, Pages
from attn_openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeFields,
    EmbeddingsRequest,
    RerankFields,
    ResponseRequest,
    ScoreFields,
    TokenizeFields,
)
from attn_openai.responses import ResponseAnswer
from attn_openai.streams import (
    CallerGoneError,
    Fault,
    JsonLines,
    error_response,
    json_response,
    shown_error,
    unless_gone,
)

BODY_SECONDS = 30.0
"""How long a client may take to send the body of a request."""
UNSAID = ("", "application/x-www-form-urlencoded")
"""Content types of programs that do not say what they send; the second is curl's."""
OF_PAGES = frozenset({"origin", "sec-fetch-site"})
"""Headers that browsers send with what pages ask of other sites."""


class Endpoint(NamedTuple):
    """What answers requests of the type `kind`: a class that has events, too, or a function with one body."""

    does: str
    kind: Any
    answer: Any


POSTS = {
    "/v1/chat/completions": Endpoint("The next message of a conversation.", ChatCompletionRequest, ChatCompletion),
    "/v1/completions": Endpoint("Completions of texts or token ids.", CompletionRequest, completions.Completion),
    "/v1/responses": Endpoint("Like chat completions, in the Responses format.", ResponseRequest, ResponseAnswer),
    "/v1/messages": Endpoint("Like chat completions, in Anthropic's format.", MessagesRequest, Message),
    "/v1/messages/count_tokens": Endpoint("The length of the prompt of a message.", MessagesRequest, count_tokens),
    "/v1/embeddings": Endpoint("A vector for each text, by an encoder.", EmbeddingsRequest, completions.embed),
    "/score": Endpoint("How near in meaning texts are, by an encoder.", ScoreFields, completions.score),
    "/rerank": Endpoint("Documents by how near in meaning they are to a text.", RerankFields, completions.rerank),
    "/tokenize": Endpoint("The token ids of a text or a conversation.", TokenizeFields, completions.tokenize),
    "/detokenize": Endpoint("The text of token ids.", DetokenizeFields, completions.detokenize),
    "/api/chat": Endpoint("Like chat completions, in Ollama's format.", ollama.ChatRequest, ollama.OllamaChat),
    "/api/generate": Endpoint("An answer, in Ollama's format.", ollama.GenerateRequest, ollama.OllamaGenerate),
    "/api/embed": Endpoint("A vector for each text, in Ollama's format.", ollama.EmbedRequest, ollama.embed_texts),
    "/api/show": Endpoint("What is known of a model, in Ollama's format.", ollama.ShowRequest, ollama.show),
}
"""The bodies that are answered, by path."""
ALIASES = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"}
"""Further paths."""
FAULTS = {"/v1/messages": error_body, "/api/": ollama.error_body}
"""How errors are shown below these paths; elsewhere in OpenAI's format."""
PATHS = {f"POST {path}": endpoint.does for path, endpoint in POSTS.items()} | {
    "GET /api/tags": "The models that are loaded, in the format of Ollama's API.",
    "GET /api/ps": "The same, with their contexts.",
    "GET /api/version": "The version of this package, in the format of Ollama's API; needs no token.",
    "POST /sleep": "Frees the memory of a model until it is woken up; for admins.",
    "POST /wake_up": "Loads a sleeping model again; for admins.",
    "GET /is_sleeping": "Whether a model sleeps.",
    "GET /v1/models": "The models that are loaded.",
    "GET /v1/models/{name:path}": "One model.",
    "GET /metrics": "The metrics for Prometheus; needs a token if the server has tokens.",
    "GET /openapi.json": "The OpenAPI document of this interface; needs no token.",
    "GET /docs": "The same as an HTML page; needs no token.",
    "GET /health": "200 while all services are ready, else 503; needs no token.",
    "GET /version": "The version of this package; needs no token.",
}
"""The method and path of each supported part of these interfaces, with its description."""

BEARER = re.compile(r"^bearer +", re.IGNORECASE)
"""The scheme of a token, in which HTTP does not distinguish capitals."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

CLIENT_GONE = 499
"""The status of a request whose client did not wait, as nginx has it."""

CALL_PATH = "/{service}/{method}"
"""The path of a gRPC call."""

Handle: TypeAlias = Callable[[Request, HttpCaller], Awaitable[Any]]


def timeout_of(request: Request) -> float | None:
    """The timeout in seconds from the Connect protocol's header, None without; raises `InvalidValue`."""
    given = request.headers.get("connect-timeout-ms")
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and 0 < int(given[:12]) < 10**10):
        raise InvalidValue.of("connect-timeout-ms", given, "a whole number of milliseconds above 0")
    return int(given) / 1000


class Counted:
    """An ASGI application whose answers are counted by route and status, and have the headers of their caller."""

    def __init__(self, app: ASGIApp, gateway: ServingState, paths: Mapping[Any, str]) -> None:
        self._app, self._gateway, self._paths = app, gateway, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        status = CLIENT_GONE

        async def note(message: ASGIMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if caller := scope.get("caller"):
                    MutableHeaders(scope=message).update(caller.headers())
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            self._gateway.answered(self._paths.get(scope.get("endpoint"), ""), status)


class HttpApplication:
    """The Starlette application in front of one gateway."""

    def __init__(self, gateway: ServingState) -> None:
        self._gateway = gateway
        self._caches: dict[str, Any] = {"kv_tokens": {}, "templates": {}, "answers": AnswerStore()}
        origins = gateway.settings.cors_origins
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        around, errors = [cors] if origins else [], {HTTPException: _unknown_path}
        routes = self._routes()
        paths = {route.endpoint: route.path for route in routes}
        counted = Middleware(Counted, gateway=gateway, paths=paths)
        self.app = Starlette(routes=routes, middleware=[counted, *around], exception_handlers=errors)

    def _routes(self) -> list[Route]:
        answers = {f"POST {path}": self._guarded(self._post(endpoint)) for path, endpoint in POSTS.items()} | {
            "GET /api/tags": self._told(ollama.tags),
            "GET /api/ps": self._told(ollama.running),
            "GET /api/version": self._version,
            "POST /sleep": self._asked(completions.sleep),
            "POST /wake_up": self._asked(completions.wake_up),
            "GET /is_sleeping": self._asked(completions.is_sleeping),
            "GET /v1/models": self._told(completions.models),
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
            "POST /ui/data/mechanism": self._asked(pages.mechanism),
            "POST /ui/data/check": self._asked(pages.check),
            "GET /ui/{path:path}": pages.file,
        }
        named = [Route(key.split()[1], answers[key], methods=[key.split()[0]]) for key in PATHS | PAGE_PATHS]
        named += [Route(other, answers[f"POST {path}"], methods=["POST"]) for other, path in ALIASES.items()]
        return [*named, Route(CALL_PATH, self._guarded(self._call), methods=["POST"])]

    def _post(self, endpoint: Endpoint) -> Handle:
        async def handle(request: Request, caller: HttpCaller) -> Any:
            body = endpoint.kind.read(await self._body(request))
            structlog.contextvars.bind_contextvars(**({"user": body.user} if body.user else {}))
            timed, answer = caller.until(body.timeout), endpoint.answer
            if not isinstance(answer, type):
                return json_response(await unless_gone(request.receive, answer(body, timed)))
            made: Any = answer(body, timed)
            if body.stream:
                return made.stream(made.events(), caller.request_id, fault_of(request))
            return json_response(await unless_gone(request.receive, made.complete()))

        return handle

    def _told(self, answer: Callable[[HttpCaller], Coroutine[Any, Any, Any]]) -> Any:
        """An endpoint without a body."""

        async def handle(request: Request, caller: HttpCaller) -> Any:
            return json_response(await unless_gone(request.receive, answer(caller)))

        return self._guarded(handle)

    def _asked(self, answer: Callable[[Request, HttpCaller], Coroutine[Any, Any, Any]]) -> Any:
        async def handle(request: Request, caller: HttpCaller) -> Response:
            return json_response(await unless_gone(request.receive, answer(request, caller)))

        return self._guarded(handle)

    def _guarded(self, handle: Handle) -> Any:
        """An endpoint that responds with the result of `handle`, or with the error that it raises."""

        async def endpoint(request: Request) -> Any:
            request_id = request_id_in(request.headers.items())
            # These must be bound here: a stream is sent by other tasks, which inherit the present context variables.
            structlog.contextvars.bind_contextvars(request_id=request_id, path=request.url.path)
            caller = request.scope["caller"] = self._caller(request, request_id)
            try:
                self._check_host(request)
                self._gateway.require_token(caller.metadata)  # before the body, which nobody else may make us read
                response = await handle(request, caller)
            except CallerGoneError:
                return Response(status_code=CLIENT_GONE)
            except Exception as error:  # noqa: BLE001 - the last place that can answer it
                response = error_response(shown_error(error, request_id), fault_of(request))
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
        if kind != "application/json" and (kind not in UNSAID or not OF_PAGES.isdisjoint(request.headers.keys())):
            # Pages of other sites can send other content types, or none, without a CORS preflight request.
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
        return JsonLines(transcoding.stream(row, message, timed, lists=lists), caller.request_id)

    def _document(self) -> Any:
        kinds = {path: endpoint.kind for path, endpoint in POSTS.items()}
        return transcoding.openapi(self._gateway.calls, PATHS | PAGE_PATHS, kinds, version("attn-openai"))

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


def fault_of(request: Request) -> Fault:
    """How an error is shown below the path of a request."""
    return next((fault for start, fault in FAULTS.items() if request.url.path.startswith(start)), body_of)


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
        return error_response(UnknownName.of("path", request.url.path, paths), fault_of(request))
    headers = error.headers if isinstance(error, HTTPException) else None  # Allow, with 405
    body = body_of(UserError(f"{request.method} is not allowed for {request.url.path}"))
    return json_response(body, status, dict(headers or {}))
