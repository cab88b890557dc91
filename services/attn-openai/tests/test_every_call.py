"""Every call is the same in this process, over gRPC, and as JSON over HTTP: its request, its response, its errors."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import Enum
from typing import Any, get_args, get_origin

import grpc.aio
import httpx2
import msgspec
import pytest
from attn_core.errors import AttnError, WrongState
from attn_gateway import Call, GatewaySettings, serving
from attn_gateway.call import SERVER
from attn_openai.server import UvicornServer
from attn_schema import DeploymentConfig, EngineConfig, Prompt, SamplingParams, TrainingConfig
from attn_schema.codec import encode, from_message, message_class, parsed, to_message, wire_fields
from attn_schema.inference import EmbedRequest, PartialCompletion, Resumption
from attn_schema.methods import METHODS, Row
from attn_schema.schema import element_of, is_noun
from google.protobuf import json_format

GIVEN = {
    Prompt: Prompt(text="a b"),
    SamplingParams: SamplingParams(max_new_tokens=2, seed=3, temperature=0.5, stop=("x",)),
    Resumption: Resumption(received=(PartialCompletion(token_ids=(1, 2)),), computed_on="here"),
    EngineConfig: EngineConfig(max_num_seqs=3),
    DeploymentConfig: DeploymentConfig(replicas=2),
    EmbedRequest: EmbedRequest(model="é", texts=("é",), max_tokens=1),
    TrainingConfig: TrainingConfig(seed=5, max_failures=0),
}
"""Nouns whose values must fit together."""
PLAIN = {str: "é", int: 1, float: 0.5, bool: True, bytes: b"\0\xff", datetime: datetime(2026, 1, 2, tzinfo=UTC)}
FULL = WrongState("the state is wrong", state="wrong")


def sample(noun: Any, depth: int = 0) -> Any:
    """An instance with a value in every field that its message can hold at the same time."""
    if noun in GIVEN:
        return GIVEN[noun]
    values, chosen = {}, set()
    for info in wire_fields(noun):
        oneof = message_class(noun).DESCRIPTOR.fields_by_name[info.name].containing_oneof
        if oneof is not None and oneof.name in chosen:
            continue
        values[info.name] = value_of(info.kind, depth)
        chosen.add(oneof.name if oneof is not None else "")
    return noun(**values)


def value_of(kind: Any, depth: int) -> Any:
    if get_origin(kind) is tuple:
        element = element_of(get_args(kind)[0]).kind
        return () if depth > 2 else (value_of(element, depth + 1),)
    if get_origin(kind) is dict:
        return {value_of(key, depth): value_of(value, depth) for key, value in [get_args(kind)]}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1]
    return sample(kind, depth + 1) if is_noun(kind) else PLAIN.get(kind, "é")


class Echo:
    """Answers every call with a sample of its response, or with an error, and keeps what it is asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.error: AttnError | None = None

    @property
    def names(self) -> list[str]:
        return sorted({row.service for row in METHODS})

    def handlers(self) -> Any:
        return {row: self.stream(row) if row.streams else self.single(row) for row in METHODS}

    def single(self, row: Row) -> Any:
        async def answer(request: Any, _: Call) -> Any:
            self.requests.append(request)
            if self.error is not None:
                raise self.error
            return sample(row.response)

        return answer

    def stream(self, row: Row) -> Any:
        async def answers(request: Any, call: Call) -> Any:
            single = await self.single(row)(request, call)
            yield single
            yield single

        return answers

    async def start(self) -> None: ...

    async def stop(self, shutdown_timeout: float) -> None: ...


async def here(row: Row, gateway: Any, request: Any) -> list[Any]:
    call = Call(request_id="law", caller=SERVER)
    if row.streams:
        return [answer async for answer in gateway.calls.stream(row, request, call)]
    return [await gateway.calls.unary(row, request, call)]


async def over_grpc(row: Row, gateway: Any, request: Any) -> list[Any]:
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        if row.streams:
            data = [answer async for answer in channel.unary_stream(row.path)(encode(request))]
        else:
            data = [await channel.unary_unary(row.path)(encode(request))]
    return [from_message(row.response, parsed(row.response, each)) for each in data]


async def over_http(row: Row, gateway: Any, request: Any) -> list[Any]:
    async with httpx2.AsyncClient(base_url=f"http://{gateway.http.address}") as client:
        answer = await client.post(row.path, json=json_format.MessageToDict(to_message(request)))
    assert answer.status_code == 200, answer.text
    bodies = [msgspec.json.decode(line) for line in answer.text.splitlines()]
    messages = [json_format.ParseDict(body["result"] if row.streams else body, message_class(row.response)())
                for body in bodies]  # fmt: skip
    return [from_message(row.response, message) for message in messages]


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row.name)
async def test_a_call_is_the_same_here_over_grpc_and_over_http(row: Row) -> None:
    echo, request = Echo(), sample(row.request)
    expected = [sample(row.response)] * (2 if row.streams else 1)
    async with serving([echo], GatewaySettings(port=0, http_port=0), http=UvicornServer()) as gateway:
        for edge in (here, over_grpc, over_http):
            assert await edge(row, gateway, request) == expected, edge
        assert echo.requests == [request] * 3
        echo.error = FULL
        with pytest.raises(WrongState):
            await here(row, gateway, request)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await over_grpc(row, gateway, request)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(AssertionError, match="the state is wrong"):
            await over_http(row, gateway, request)


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row.name)
def test_a_row_says_what_the_proto_file_says(row: Row) -> None:
    services = message_class(row.request).DESCRIPTOR.file.services_by_name
    method = services[row.service.rpartition(".")[2]].methods_by_name[row.name]
    assert (method.input_type, method.output_type) == (
        message_class(row.request).DESCRIPTOR,
        message_class(row.response).DESCRIPTOR,
    )
    assert (method.client_streaming, method.server_streaming) == (False, row.streams)
    for noun in (row.request, row.response):
        assert {info.name for info in wire_fields(noun)} == set(message_class(noun).DESCRIPTOR.fields_by_name)
