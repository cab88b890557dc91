"""Conversion of errors for gRPC: a canonical code and a `google.rpc.Status` with typed details."""

from __future__ import annotations

import sys

import grpc
from attn_core import errors
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

DOMAIN = "attn.dev"
DETAILS_KEY = "grpc-status-details-bin"
"""Metadata key of the serialised `google.rpc.Status`, as gRPC clients expect it."""

RETRY_SECONDS = 1.0
"""The retry delay if the error has none."""

MESSAGE_BYTES = 800
FACT_BYTES = 200
MOST_FACTS = 12
"""Limits of an error's message and metadata, in bytes and entries: clients accept 8 kB of metadata, which contains the
message twice."""

CODES: tuple[tuple[type[errors.AttnError], grpc.StatusCode], ...] = (
    (errors.UnknownName, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.WrongState, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.MissingPackage, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.UserError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.OutOfCapacity, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.AttnError, grpc.StatusCode.INTERNAL),
)
"""The code of each family of errors; the first match counts."""


def code_of(error: errors.AttnError) -> grpc.StatusCode:
    """The canonical code of an error."""
    return next(code for kind, code in CODES if isinstance(error, kind))


def status_of(error: errors.AttnError) -> Status:
    """The error as a `google.rpc.Status` with all its details."""
    status = Status(code=code_of(error).value[0], message=shortened(error.message, MESSAGE_BYTES))
    for detail in _details(error):
        status.details.add().Pack(detail)
    return status


def public_error(error: Exception, request_id: str) -> errors.AttnError:
    """The error that a client may see: an `AttnError` as it is, unwrapped from Ray; of others only the request id."""
    cause = getattr(error, "cause", None)
    for candidate in (cause, error):
        if isinstance(candidate, errors.AttnError):
            return candidate
    if _is_dead_actor(error):
        return errors.Unavailable("the worker that answered this call is gone; another is being started")
    return errors.InternalError(f"internal error, request id {request_id}", request_id=request_id)


def _is_dead_actor(error: Exception) -> bool:
    """Whether the error is Ray's for an actor that died; False if Ray is not imported in this process."""
    ray = sys.modules.get("ray.exceptions")
    return ray is not None and isinstance(error, ray.RayActorError)


def shortened(text: str, limit: int) -> str:
    """The text, with its middle cut out if it is longer than `limit` bytes of UTF-8."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= limit:
        return data.decode()
    half = (limit - len("…".encode())) // 2
    return data[:half].decode(errors="ignore") + "…" + data[-half:].decode(errors="ignore")


def _details(error: errors.AttnError) -> list[Message]:
    facts = {key: shortened(value, FACT_BYTES) for key, value in list(error.metadata.items())[:MOST_FACTS]}
    message = shortened(error.message, MESSAGE_BYTES)
    found: list[Message] = [ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts)]
    if isinstance(error, errors.UnknownName):
        found.append(
            ResourceInfo(resource_type=facts.get("kind", ""), resource_name=facts.get("name", ""), description=message)
        )
    elif isinstance(error, errors.UserError) and "field" in facts:
        violation = BadRequest.FieldViolation(field=facts["field"], description=message)
        found.append(BadRequest(field_violations=[violation]))
    elif isinstance(error, errors.OutOfCapacity | errors.Unavailable):
        found.append(RetryInfo(retry_delay=_delay(facts)))
    return found


def _delay(facts: dict[str, str]) -> Duration:
    delay = Duration()
    try:
        seconds = float(facts.get("retry_seconds", RETRY_SECONDS))
        delay.FromNanoseconds(int(seconds * 1e9))
    except (ValueError, OverflowError):
        delay.FromSeconds(int(RETRY_SECONDS))
    return delay
