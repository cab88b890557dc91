"""Requests that tests make, and what they check again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub


def ask(text: str = "To be", model: str = "tiny", **sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=model, prompt=common_pb2.Prompt(text=text), sampling=inference_pb2.SamplingParams(**sampling)
    )


async def complete(stub: InferenceServiceStub, request: inference_pb2.GenerateRequest) -> list[int]:
    return [token.id async for message in stub.Generate(request) for token in message.tokens]


async def drained(
    stub: InferenceServiceStub, model: str = "tiny", seconds: float = 5
) -> inference_pb2.GetEngineStatsResponse:
    """The load once nothing runs and nothing is held, or as it is after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        load = await stub.GetEngineStats(inference_pb2.GetEngineStatsRequest(model=model))
        if (load.running + load.waiting + load.kv_tokens_used == 0) or time.monotonic() > end:
            return load
        await asyncio.sleep(0.02)


async def begun(stub: InferenceServiceStub, model: str) -> None:
    """Return once the model has computed something."""
    while True:
        if (await stub.GetEngineStats(inference_pb2.GetEngineStatsRequest(model=model))).computed_tokens:
            return
        await asyncio.sleep(0.001)


@asynccontextmanager
async def refused(code: grpc.StatusCode, *words: str) -> AsyncIterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code, caught.value.details()
    for word in words:
        assert word in (caught.value.details() or "")


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something is so; raises `TimeoutError`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        await asyncio.sleep(0.005)
