"""Scores over gRPC: whose they are, and what ends them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from asking_inference import begun, drained, refused
from attn.v1 import common_pb2, model_pb2
from attn.v1 import inference_pb2 as wire
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2 import LoadModelRequest
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_engine.client import TextTask
from attn_engine.host.engine import EngineHost
from attn_schema import EngineConfig, Prompt, ScoringParams

NAME = "narrow"
LENGTH = 200
MANY = 60
LOAD = wire.GetEngineStatsRequest(model=NAME)


def prompts(count: int, length: int = LENGTH) -> wire.ScoreRequest:
    return wire.ScoreRequest(model=NAME, prompts=[common_pb2.Prompt(text="x" * length)] * count)


def token(of: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {of}"),)


@pytest.fixture
async def narrow(stub: InferenceServiceStub, models: ModelServiceStub) -> InferenceServiceStub:
    """A model that reads 32 tokens a step, so that many prompts take many steps."""
    await models.LoadModel(
        LoadModelRequest(name=NAME, source="tiny", engine=model_pb2.EngineConfig(max_num_batched_tokens=32))
    )
    return stub


@pytest.mark.parametrize(("second", "overtakes"), [("bob", True), ("ann", False)])
async def test_a_tenant_with_one_prompt_does_not_wait_for_the_many_of_another(
    narrow: InferenceServiceStub, second: str, overtakes: bool
) -> None:
    """The weights are of the token that the caller gave: one's own work is done in its order."""
    many = asyncio.ensure_future(narrow.Score(prompts(MANY), metadata=token("ann")))
    await begun(narrow, NAME)
    (score,) = (await narrow.Score(prompts(1, 20), metadata=token(second))).scores
    waiting = (await narrow.GetEngineStats(LOAD)).waiting
    assert len(score.tokens) == 20
    assert (waiting > MANY // 2) == overtakes
    many.cancel()
    await asyncio.gather(many, return_exceptions=True)


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "deadline"])
async def test_scores_end_with_their_caller(narrow: InferenceServiceStub, cancelled: bool) -> None:
    """Nothing is computed or held for a caller who went away, or whose time was over."""
    call = narrow.Score(prompts(MANY), timeout=None if cancelled else 0.2)
    await begun(narrow, NAME)
    if cancelled:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    else:
        # Prompts that are not yet admitted when the engine knows its speed may be refused as too late.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    load = await drained(narrow, NAME)
    assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)
    assert load.computed_tokens < MANY * LENGTH
    assert len((await narrow.Score(prompts(1))).scores[0].tokens) == LENGTH


async def test_one_prompt_that_is_refused_ends_the_others(narrow: InferenceServiceStub) -> None:
    """A prompt that is too long is refused, and those beside it are not computed to their end for nobody."""
    request = prompts(MANY)
    request.prompts.append(common_pb2.Prompt(text="x" * 1000))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "1000"):
        await narrow.Score(request)
    load = await drained(narrow, NAME)
    assert (load.running, load.waiting, load.kv_tokens_used) == (0, 0, 0)
    assert load.computed_tokens < MANY * LENGTH


async def test_the_engine_itself_keeps_the_deadline_of_a_score(home: Path) -> None:
    """Time that is over when the engine begins ends the score, whether or not the caller is still there."""
    loop, told = asyncio.get_running_loop(), asyncio.Queue[Any]()
    host = EngineHost(
        home / "models" / "tiny",
        EngineConfig(num_threads=1),
        lambda outputs: loop.call_soon_threadsafe(told.put_nowait, outputs) and None,
    )
    host.submit(TextTask(prompt=Prompt(text="x"), params=ScoringParams(), timeout=0))
    (output,) = await told.get()
    assert (output.error and output.error.reason, output.delta.tokens) == ("DEADLINE_EXCEEDED", ())
    host.stop(0)
