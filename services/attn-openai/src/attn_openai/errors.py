"""Errors in OpenAI's format, with the HTTP status on which its clients act."""

from __future__ import annotations

import math
from typing import Any

import grpc
from attn_core.errors import AttnError, ContextLengthExceeded, MissingPackage, UnknownName, UserError
from attn_gateway import code_of

STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "not_found_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "invalid_request_error"),
}
"""HTTP status and type of an error by its canonical code; others are 500. Clients retry 429 and 5xx."""

RETRY_SECONDS = 1.0
"""The `retry-after` of errors without a retry delay."""
REQUEST_TIMEOUT = 408
NO_RETRY = frozenset({409, 501, 504})
"""Statuses that OpenAI's clients would retry, although the same request can only fail, or last as long, again."""


class SlowRequestError(UserError):
    """The client did not send a whole request in time; over HTTP this is status 408."""

    reason = "REQUEST_TIMEOUT"


def status_of(error: AttnError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, SlowRequestError):
        return REQUEST_TIMEOUT
    if isinstance(error, UnknownName) and error.metadata.get("kind") != "model" and "field" not in error.metadata:
        # A name within the request is unknown; 404 is for unknown resources and paths.
        return 404 if error.metadata.get("kind") in {"job", "mechanism", "path"} else 400
    return STATUSES.get(code_of(error), (500, "server_error"))[0]


def body_of(error: AttnError) -> dict[str, Any]:
    """The body of an error response, in OpenAI's format."""
    status = status_of(error)
    kind = next((kind for number, kind in STATUSES.values() if number == status), "server_error")
    return {"error": {"message": message_of(error), "type": kind, "param": param_of(error), "code": word_of(error)}}


def message_of(error: AttnError) -> str:
    """The message; that of a context overflow in the words by which LiteLLM and LangChain recognise it."""
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    return f"This model's maximum context length is {error.metadata['max_seq_len']} tokens; {error.message}"


def param_of(error: AttnError) -> str | None:
    """The field of the request that caused the error; None if it is not known."""
    facts = error.metadata
    if isinstance(error, UnknownName):
        kind = facts.get("kind", "")
        return "model" if kind == "model" else facts.get("name") if kind.startswith("field") else None
    return facts.get("field") or facts.get("argument")


def word_of(error: AttnError) -> str:
    """The stable error code in OpenAI's spelling."""
    if isinstance(error, ContextLengthExceeded):
        return "context_length_exceeded"
    if isinstance(error, UnknownName):
        kind = error.metadata.get("kind", "name")
        return "unknown_field" if kind.startswith("field") else f"{kind.replace(' ', '_')}_not_found"
    if isinstance(error, MissingPackage):
        return "missing_package"
    return error.reason.lower()


def headers_of(error: AttnError) -> dict[str, str]:
    """The headers of an error response: whether and when to retry, or how to authenticate; after a timeout, that it
    closes."""
    status = status_of(error)
    if status in {REQUEST_TIMEOUT, 429, 503}:
        seconds = float(error.metadata.get("retry_seconds", RETRY_SECONDS))
        wait = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
        return wait | {"connection": "close"} if status == REQUEST_TIMEOUT else wait
    if status in NO_RETRY:
        return {"x-should-retry": "false"}
    return {"www-authenticate": "Bearer"} if status == 401 else {}
