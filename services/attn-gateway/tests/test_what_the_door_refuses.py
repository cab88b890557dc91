"""Bytes, sizes, methods and callers that do not get in."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest
from attn.v1 import common_pb2
from attn.v1 import inference_pb2 as pb
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_gateway import Call, GatewaySettings, TlsFiles, serving
from attn_gateway import gateway as gateway_module
from attn_schema import Schema
from attn_schema.methods import Method
from google.protobuf import wrappers_pb2

TOKENIZE = "/attn.v1.InferenceService/Tokenize"
GENERATE = "/attn.v1.InferenceService/Generate"


async def send(channel: grpc.aio.Channel, method: str, data: bytes, **options: Any) -> bytes:
    """Raw bytes to a unary method, raw bytes back."""
    return await channel.unary_unary(method)(data, **options)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


INVALID_UTF8 = b"\x0a\x02\xff\xfe"
WRONG_WIRE_TYPE = b"\x0b"
TRUNCATED = pb.TokenizeRequest(model="words").SerializeToString()[:-2]


@pytest.mark.parametrize("data", [INVALID_UTF8, WRONG_WIRE_TYPE, TRUNCATED, b"\xff" * 50])
async def test_bytes_that_are_no_message_are_the_callers_mistake(channel: grpc.aio.Channel, data: bytes) -> None:
    failure = await refusal(send(channel, TOKENIZE, data))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a valid message" in failure.details()
    assert "Exception" not in failure.details()


async def test_a_stream_refuses_wrong_bytes_too(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream(GENERATE)(INVALID_UTF8)
    failure = await refusal(call.read())
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_random_bytes_never_look_like_a_fault_of_ours(channel: grpc.aio.Channel) -> None:
    draw = random.Random(7)
    calls = [channel.unary_unary(TOKENIZE)(draw.randbytes(draw.randrange(1, 40))) for _ in range(200)]
    codes = {await call.code() for call in calls}
    # Some random bytes are a message with unknown fields only, which has no prompt.
    assert codes == {grpc.StatusCode.INVALID_ARGUMENT}


async def test_unknown_fields_are_let_through(channel: grpc.aio.Channel) -> None:
    data = pb.TokenizeRequest(model="words", prompt=common_pb2.Prompt(text="a b")).SerializeToString() + b"\x98\x3f\x01"
    answer = pb.TokenizeResponse.FromString(await send(channel, TOKENIZE, data))
    assert [token.text for token in answer.tokens] == ["a", "b"]


async def test_a_request_over_four_mebibytes_is_refused_by_its_size(stub: InferenceServiceStub, words: Any) -> None:
    failure = await refusal(stub.Tokenize(words.tokenize(text="x" * (4 * 2**20 + 1))))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not words.calls


async def test_a_method_that_does_not_exist_is_unimplemented(channel: grpc.aio.Channel) -> None:
    for method in ("/attn.v1.InferenceService/Fly", "/attn.v9.Other/Fly"):
        assert (await refusal(send(channel, method, b""))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_call_that_a_service_does_not_have_is_unimplemented(channel: grpc.aio.Channel) -> None:
    failure = await refusal(InferenceServiceStub(channel).GetEngineStats(pb.GetEngineStatsRequest()))
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED
    failure = await refusal(InferenceServiceStub(channel).AttentionMaps(pb.AttentionMapsRequest()).read())
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_headers_of_a_megabyte_are_refused(stub: InferenceServiceStub, words: Any) -> None:
    failure = await refusal(stub.Tokenize(words.tokenize(), metadata=(("x-much", "y" * 2**20),)))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer wrong"),),
        (("authorization", "right"),),
        (("authorization", "Bearer right"), ("authorization", "Bearer wrong")),
    ],
)
async def test_without_the_token_no_call_gets_in(words: Any, metadata: Any) -> None:
    async with (
        serving([words], GatewaySettings(port=0, token="right")) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        stub = InferenceServiceStub(channel)
        failure = await refusal(stub.Tokenize(words.tokenize(), metadata=metadata))
        assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
        failure = await refusal(stub.Generate(words.generate(), metadata=metadata).read())
        assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
        failure = await refusal(send(channel, "/attn.v1.No/No", b"", metadata=metadata))
        assert failure.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not words.calls


async def test_the_token_opens_the_door(words: Any) -> None:
    async with (
        serving([words], GatewaySettings(port=0, token="right")) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        metadata = (("authorization", "Bearer right"),)
        answer = await InferenceServiceStub(channel).Tokenize(words.tokenize(), metadata=metadata)
    assert len(answer.tokens) == 3


async def test_with_tls_a_trusted_caller_gets_in_and_plain_text_does_not(words: Any, certificate: TlsFiles) -> None:
    async with serving([words], GatewaySettings(port=0, tls=certificate)) as gateway:
        trusted = grpc.ssl_channel_credentials(certificate.certificate.read_bytes())
        async with grpc.aio.secure_channel(gateway.address, trusted) as channel:
            assert len((await InferenceServiceStub(channel).Tokenize(words.tokenize())).tokens) == 3
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            failure = await refusal(InferenceServiceStub(channel).Tokenize(words.tokenize(), timeout=60))
            assert failure.code() is grpc.StatusCode.UNAVAILABLE


async def test_calls_over_the_limit_are_refused_at_once_and_the_others_end_well(words: Any) -> None:
    async with (
        serving([words], GatewaySettings(port=0, max_calls=3)) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        stub = InferenceServiceStub(channel)

        async def texts() -> list[str]:
            return [message.text async for message in stub.Generate(words.generate("a b c d e f"))]

        results = await asyncio.gather(*(texts() for _ in range(8)), return_exceptions=True)
    well = [result for result in results if result == list("abcdef")]
    refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert len(well) == 3
    assert {failure.code() for failure in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(refused) == 5


async def test_each_of_several_tokens_opens_the_door_and_no_other(words: Any) -> None:
    settings = GatewaySettings(port=0, token="right", other_tokens=("fine",))
    async with serving([words], settings) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
        stub = InferenceServiceStub(channel)
        for token in ("right", "fine"):
            metadata = (("authorization", f"Bearer {token}"),)
            assert len((await stub.Tokenize(words.tokenize(), metadata=metadata)).tokens) == 3
        for token in ("wrong", "", "right fine"):
            failure = await refusal(stub.Tokenize(words.tokenize(), metadata=(("authorization", f"Bearer {token}"),)))
            assert failure.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_connections_without_a_handshake_do_not_keep_callers_out(
    words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "HANDSHAKE_SECONDS", 1)
    async with (
        serving([words], GatewaySettings(port=0, max_connections=4)) as gateway,
        contextlib.AsyncExitStack() as idle,
    ):
        host, port = gateway.address.rsplit(":", 1)
        readers = []
        for _ in range(12):
            reader, writer = await asyncio.open_connection(host, int(port))
            idle.callback(writer.close)
            readers.append(reader)
        async with grpc.aio.insecure_channel(gateway.address) as channel, asyncio.timeout(10):
            assert await InferenceServiceStub(channel).Tokenize(words.tokenize(), wait_for_ready=True)
            await asyncio.gather(*(reader.read() for reader in readers))


class Text(Schema, frozen=True, kw_only=True):
    """A noun of another package, with a message of its own."""

    MESSAGE: ClassVar = wrappers_pb2.StringValue
    value: str = ""


class Stranger:
    """A service with a call of its own."""

    names = ("stranger.v1.Shouts",)
    SHOUT = Method(service="stranger.v1.Shouts", name="Shout", request=Text, response=Text)

    def handlers(self) -> Any:
        return {self.SHOUT: self.shout}

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...

    async def shout(self, request: Text, call: Call) -> Text:
        call.caller.require_admin("shouting")
        return Text(value=request.value.upper())


async def test_a_service_may_have_calls_of_its_own() -> None:
    settings = GatewaySettings(port=0, token="op", other_tokens=("user",))
    async with serving([Stranger()], settings) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:

        async def shout(token: str) -> str:
            data = wrappers_pb2.StringValue(value="hi").SerializeToString()
            metadata = (("authorization", f"Bearer {token}"),)
            answer = await send(channel, Stranger.SHOUT.path, data, metadata=metadata)
            return str(wrappers_pb2.StringValue.FromString(answer).value)

        assert await shout("op") == "HI"
        assert (await refusal(shout("user"))).code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await refusal(shout("other"))).code() is grpc.StatusCode.UNAUTHENTICATED
