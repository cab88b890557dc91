"""Cancellation and deadlines reach the handler."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from attn.v1.inference_pb2_grpc import InferenceServiceStub

LONG = " ".join(str(number) for number in range(10_000))


async def test_a_stream_arrives_whole_and_in_order(stub: InferenceServiceStub, words: Any) -> None:
    assert [message.text async for message in stub.Generate(words.generate("a b c"))] == ["a", "b", "c"]
    await words.freed.wait()


@pytest.mark.parametrize("read", [1, 2, 5])
async def test_a_dropped_call_frees_the_handlers_work(stub: InferenceServiceStub, words: Any, read: int) -> None:
    call = stub.Generate(words.generate(LONG))
    for _ in range(read):
        await call.read()
    call.cancel()
    await asyncio.wait_for(words.freed.wait(), timeout=60)


async def test_every_one_of_many_dropped_calls_frees_its_work(stub: InferenceServiceStub, words: Any) -> None:
    for _ in range(40):
        words.freed.clear()
        call = stub.Generate(words.generate(LONG))
        await call.read()
        call.cancel()
        await asyncio.wait_for(words.freed.wait(), timeout=60)


async def test_a_client_that_does_not_read_does_not_keep_the_work_alive_after_it_goes(
    stub: InferenceServiceStub, words: Any
) -> None:
    call = stub.Generate(words.generate(" ".join(["x" * 100_000] * 40)))
    await call.read()
    await asyncio.sleep(0.3)  # the flow-control window is full now and the handler is parked at its yield
    call.cancel()
    await asyncio.wait_for(words.freed.wait(), timeout=60)


async def test_the_deadline_ends_the_work(stub: InferenceServiceStub, words: Any, receive: Any) -> None:
    received = await receive(stub.Generate(words.generate(LONG), timeout=3))
    assert received.failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert received.texts
    await asyncio.wait_for(words.freed.wait(), timeout=60)


async def test_the_handler_knows_the_deadline(stub: InferenceServiceStub, words: Any) -> None:
    await stub.Tokenize(words.tokenize(), timeout=60)
    remaining = words.calls[-1].remaining()
    assert 50 < remaining < 61  # gRPC rounds a deadline up
    await stub.Tokenize(words.tokenize())
    assert words.calls[-1].deadline is None
    assert words.calls[-1].remaining() is None
