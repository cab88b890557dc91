"""Conversion of failed gRPC calls to the exceptions of `attn_core.errors`."""

from __future__ import annotations

from typing import Any

import grpc
from attn_core import errors
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

DETAILS_KEY = "grpc-status-details-bin"


class NoServer(errors.Unavailable):
    """No server answers at an address, or the connection to it broke."""

    reason = "NO_SERVER"

    @property
    def never_sent(self) -> bool:
        """Whether the connection could not be established, so that no server received the call."""
        return "failed to connect" in self.metadata.get("cause", "").lower()


BY_CODE: dict[grpc.StatusCode, type[errors.AttnError]] = {
    grpc.StatusCode.NOT_FOUND: errors.UnknownName,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: errors.WrongState,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Unauthenticated,
    grpc.StatusCode.INVALID_ARGUMENT: errors.UserError,
    grpc.StatusCode.UNIMPLEMENTED: errors.Incompatible,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OutOfCapacity,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
}
"""The error class for a gRPC status code, used if the server sent no reason that this version knows."""


def error_of(failure: grpc.RpcError, address: str) -> errors.AttnError:
    """The exception for a failed call to `address`: the one that the server reports, or one for the gRPC failure."""
    code, text = failure.code(), failure.details() or ""
    status = _status_in(failure.trailing_metadata() or ())
    if status is not None:
        return from_status(status)
    if code is grpc.StatusCode.UNAVAILABLE:
        return NoServer(_unreachable(address, text), address=address, cause=text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return errors.UserError(f"the message is too large for the connection: {text}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"the call to {address} did not end in the time it was given"
        return errors.DeadlineExceeded(message, address=address, cause=text)
    kind = BY_CODE.get(code, errors.InternalError)
    return kind(text or f"the call ended with {code.name}", code=code.name)


def _unreachable(address: str, cause: str) -> str:
    """Why no server is reached, from gRPC's description of the cause."""
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        return f"the certificate of {address} is not trusted by the authority that --tls-ca names"
    if "Tls handshake failed" in cause:
        return f"what listens at {address} does not speak TLS; leave out --tls-ca for a server without TLS"
    if "failed to connect" in cause and ("Socket closed" in cause or "Failed parsing HTTP/2" in cause):
        return f"what listens at {address} is no attn server without TLS; for one with TLS, name its --tls-ca"
    return f"no attn server answers at {address}; start one with: attn serve"


def from_status(status: Status) -> errors.AttnError:
    """The exception that a `google.rpc.Status` describes; its class is found by the reason, else by the code."""
    info = ErrorInfo()
    reason, facts = "", {}
    if any(detail.Unpack(info) for detail in status.details):
        reason, facts = info.reason, dict(info.metadata)
    code = next((code for code in grpc.StatusCode if code.value[0] == status.code), grpc.StatusCode.UNKNOWN)
    return errors.error_of_reasons([reason, BY_CODE.get(code, errors.InternalError).reason], status.message, facts)


def _status_in(metadata: Any) -> Status | None:
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                return None
    return None
