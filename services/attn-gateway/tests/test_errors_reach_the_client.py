"""Errors arrive with their canonical code and typed details, and nothing of ours leaks."""

from __future__ import annotations

from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_core import errors
from attn_gateway import status_of
from attn_gateway.status import CODES, code_of, public_error
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, ResourceInfo, RetryInfo
from google.rpc.status_pb2 import Status

Failure = grpc.aio.AioRpcError
Kind = TypeVar("Kind", bound=Message)


def trailing(failure: Failure) -> dict[str, Any]:
    return dict(failure.trailing_metadata())


def status(failure: Failure) -> Status:
    return Status.FromString(trailing(failure)["grpc-status-details-bin"])


def detail(failure: Failure, kind: type[Kind]) -> Kind:
    message = kind()
    assert any(found.Unpack(message) for found in status(failure).details)
    return message


async def failure_of(call: Any) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_an_unknown_name_is_not_found_and_says_which_names_are_near(
    stub: InferenceServiceStub, words: Any
) -> None:
    failure = await failure_of(stub.Tokenize(words.tokenize("unknown")))
    assert failure.code() is grpc.StatusCode.NOT_FOUND
    assert "did you mean 'smollm2'" in failure.details()
    assert detail(failure, ResourceInfo).resource_name == "smolm2"
    info = detail(failure, ErrorInfo)
    assert (info.reason, info.domain, info.metadata["near"]) == ("UNKNOWN_NAME", "attn.dev", "smollm2")


async def test_an_invalid_value_names_the_field(stub: InferenceServiceStub, words: Any) -> None:
    failure = await failure_of(stub.Tokenize(words.tokenize("invalid")))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = detail(failure, BadRequest).field_violations
    assert violation.field == "temperature"
    assert "-1" in violation.description
    assert status(failure).code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_lack_of_room_says_when_to_try_again(stub: InferenceServiceStub, words: Any) -> None:
    failure = await failure_of(stub.Tokenize(words.tokenize("full")))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(failure, RetryInfo).retry_delay.ToMilliseconds() == 2500


async def test_a_fault_of_ours_shows_the_request_id_and_nothing_else(
    stub: InferenceServiceStub, words: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    call = stub.Tokenize(words.tokenize("bug"), metadata=(("x-request-id", "mine-1"),))
    failure = await failure_of(call)
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "mine-1" in failure.details()
    assert "secret" not in failure.details()
    assert "secret" not in str(status(failure))
    logged = capsys.readouterr().out
    assert "secret prompt" in logged
    assert "Traceback" in logged
    assert "mine-1" in logged


async def test_a_fault_in_the_middle_of_a_stream_keeps_what_was_sent(
    stub: InferenceServiceStub, words: Any, receive: Any
) -> None:
    received = await receive(stub.Generate(words.generate("one two bug four")))
    assert received.texts == ["one", "two"]
    assert received.failure.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in received.failure.details()


async def test_the_request_id_is_echoed_or_made(stub: InferenceServiceStub, words: Any) -> None:
    call = stub.Tokenize(words.tokenize(), metadata=(("x-request-id", "mine-2"),))
    assert dict(await call.trailing_metadata())["x-request-id"] == "mine-2"
    assert words.calls[-1].request_id == "mine-2"
    other = stub.Tokenize(words.tokenize())
    assert len(dict(await other.trailing_metadata())["x-request-id"]) == 32
    failure = await failure_of(stub.Tokenize(words.tokenize("full"), metadata=(("x-request-id", "mine-3"),)))
    assert trailing(failure)["x-request-id"] == "mine-3"


@pytest.mark.parametrize("bad", ["", "two words", "x" * 129])
async def test_a_request_id_that_could_spoil_a_log_is_replaced(
    stub: InferenceServiceStub, words: Any, bad: str
) -> None:
    call = stub.Tokenize(words.tokenize(), metadata=(("x-request-id", bad),))
    made = dict(await call.trailing_metadata())["x-request-id"]
    assert made != bad
    assert len(made) == 32


@pytest.mark.parametrize(("kind", "code"), CODES)
def test_a_status_and_the_call_carry_the_same_code(kind: type[errors.AttnError], code: grpc.StatusCode) -> None:
    error = kind("what was wrong")
    assert code_of(error) is code
    made = status_of(error)
    assert (made.code, made.message) == (code.value[0], "what was wrong")


def test_an_error_wrapped_by_ray_is_shown_as_itself() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    wrapped = RayTaskError("step", "traceback text", errors.InvalidValue.of("top_k", -5, "1 or more"))
    dual = wrapped.as_instanceof_cause()
    assert public_error(dual, "id").message == "top_k: -5 is not allowed; allowed: 1 or more"
    assert isinstance(public_error(ActorDiedError(), "id"), errors.Unavailable)
    bug = RayTaskError("step", "secret", KeyError("secret")).as_instanceof_cause()
    assert "secret" not in public_error(bug, "id").message
