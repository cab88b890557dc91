"""What a server answered, as the error it was there."""

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
        """Whether there was no connection, so that no server has seen the call."""
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
"""The error of a code, where the server gave no reason that this version knows."""


def error_of(failure: grpc.RpcError, address: str) -> errors.AttnError:
    """The error behind a failed call to `address`: the server's own, or what the failure of gRPC means."""
    code, text = failure.code(), failure.details() or ""
    status = _status_in(failure.trailing_metadata() or ())
    if status is not None:
        return from_status(status)
    if code is grpc.StatusCode.UNAVAILABLE:
        message = f"no attn server answers at {address}; start one with: attn serve"
        return NoServer(message, address=address, cause=text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return errors.UserError(f"the message is too large for the connection: {text}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"the call to {address} did not end in the time it was given"
        return errors.DeadlineExceeded(message, address=address, cause=text)
    kind = BY_CODE.get(code, errors.InternalError)
    return kind(text or f"the call ended with {code.name}", code=code.name)


def from_status(status: Status) -> errors.AttnError:
    """The error that a `google.rpc.Status` carries; its class is found by the reason, else by the code."""
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
