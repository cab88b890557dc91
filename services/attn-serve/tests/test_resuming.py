"""A call whose engine is lost goes on at another engine; how long and how often is bounded."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from asking_inference import ask, complete, refused
from attn.v1 import inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_core.errors import DeadlineExceeded
from attn_engine.client import EngineClient, EngineLost, TextTask, repeated, resumed
from attn_engine.in_process import InProcess
from attn_schema import EngineConfig, OutputDelta, Prompt, SamplingParams, ScoringParams
from attn_schema.resuming import MAX_BREAKS


def task(params: Any = None, timeout: float | None = None) -> TextTask:
    given = params or SamplingParams(max_new_tokens=60, temperature=1.0)
    return TextTask(prompt=Prompt(text="To be"), params=given, timeout=timeout)


@dataclass
class Breaking:
    """Follows tasks in a real engine, and loses it after so many deltas, once for each number."""

    engine: EngineClient
    after: list[int] = field(default_factory=list)
    parts: list[TextTask] = field(default_factory=list)

    async def follow(self, part: TextTask) -> AsyncGenerator[OutputDelta, None]:
        self.parts.append(part)
        left = self.after.pop(0) if self.after else None
        async for delta in self.engine.streams.follow(part, self.engine.submit, self.engine.cancel):
            if left == 0:
                raise EngineLost("the engine died")
            left = None if left is None else left - 1
            yield delta

    async def tokens(self, wanted: TextTask) -> list[int]:
        return [token.id async for delta in resumed(wanted, self.follow) for token in delta.tokens]


@pytest.fixture
async def engine(home: Path) -> Any:
    running = InProcess(home / "models" / "tiny", EngineConfig(num_threads=1))
    await running.start()
    yield running
    await running.stop(0)


async def test_a_request_that_samples_without_a_seed_keeps_the_one_it_began_with(engine: EngineClient) -> None:
    breaking = Breaking(engine, [3, 9, 20])
    found = await breaking.tokens(task())
    first = breaking.parts[0].params
    assert isinstance(first, SamplingParams)
    assert first.seed is not None
    assert found == await Breaking(engine).tokens(task(first))
    assert [part.params for part in breaking.parts] == [first] * 4
    assert len({part.id for part in breaking.parts}) == 4


async def test_scores_go_on_too(engine: EngineClient) -> None:
    wanted = task(ScoringParams(top_logprobs=1))
    assert await Breaking(engine, [0]).tokens(wanted) == await Breaking(engine).tokens(wanted)


async def test_a_request_that_every_engine_dies_of_ends(engine: EngineClient) -> None:
    breaking = Breaking(engine, [2, *[0] * 100])
    with pytest.raises(EngineLost):
        await breaking.tokens(task())
    assert len(breaking.parts) == 1 + MAX_BREAKS


async def test_no_attempt_begins_after_the_deadline(engine: EngineClient) -> None:
    breaking = Breaking(engine)

    async def nobody(part: TextTask) -> AsyncGenerator[OutputDelta, None]:
        breaking.parts.append(part)
        lost = EngineLost("the engine is being started again")
        lost.accepted = False
        raise lost
        yield OutputDelta()

    with pytest.raises(DeadlineExceeded):
        async for _ in resumed(task(timeout=0.3), nobody):
            pass
    given = [part.timeout for part in breaking.parts]
    assert all(0 < later < sooner <= 0.3 for sooner, later in itertools.pairwise(given))


async def test_a_call_with_one_answer_is_made_again(engine: EngineClient) -> None:
    left = [EngineLost("died")] * 4

    async def call() -> int:
        if left:
            raise left.pop()
        return 7

    assert await repeated(call) == 7
    left = [EngineLost("died")] * 10_000
    with pytest.raises(DeadlineExceeded):
        await repeated(call, 0.2)


async def test_over_the_wire_the_rest_of_a_stream_is_sent(stub: InferenceServiceStub) -> None:
    request = ask("To be", max_new_tokens=30, temperature=1.0, seed=3)
    messages = [message async for message in stub.Generate(request)]
    whole = [token.id for message in messages for token in message.tokens]
    assert messages[0].computed_on
    for cut in (1, 13, 29):
        received = inference_pb2.PartialCompletion(token_ids=whole[:cut])
        resumption = inference_pb2.Resumption(received=[received], computed_on=messages[0].computed_on)
        rest = inference_pb2.GenerateRequest()
        rest.CopyFrom(request)
        rest.resume.CopyFrom(resumption)
        last = [message async for message in stub.Generate(rest)]
        assert [token.id for message in last for token in message.tokens] == whole[cut:]
        assert last[-1].usage.completion_tokens == 30
        assert not last[-1].HasField("warning")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda request: request.resume.received.add(index=64), "index"),
        (lambda request: request.resume.received.add(token_ids=[999]), "token id"),
        (lambda request: request.resume.SetInParent(), "received"),
        (lambda request: request.resume.received.add(finished=True), "has not"),
    ],
)
async def test_what_cannot_have_been_received_is_refused(
    stub: InferenceServiceStub, change: Callable[[Any], Any], said: str
) -> None:
    request = ask("To be", max_new_tokens=5)
    change(request)
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, said):
        await asyncio.wait_for(complete(stub, request), timeout=60)
