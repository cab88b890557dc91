"""Versions of a model: shares of traffic, conversations that stay, updates and rollbacks that break no stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from asking_inference import ask, complete, refused, until
from attn.v1 import inference_pb2, model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_core.errors import InvalidValue, UnknownName
from attn_gateway import Gateway
from attn_schema import ChatMessage, DeploymentConfig, EngineConfig, Prompt
from attn_serve.fleet import WantedModel
from attn_serve.versions import conversation_key, new_shares, pick, shares_wanted
from hypothesis import given
from hypothesis import strategies as st

ONE_THREAD = EngineConfig(num_threads=1)
KEYS = [str(number).encode() for number in range(4000)]


def chat(*contents: str) -> Prompt:
    roles = ("system", "user", "assistant", "user", "assistant")
    return Prompt(chat=tuple(ChatMessage(role=role, content=text) for role, text in zip(roles, contents, strict=False)))


def test_a_version_gets_its_share_of_the_conversations() -> None:
    for share in (0.0, 0.1, 0.5, 1.0):
        chosen = [pick({"m@1": 1 - share, "m@2": share}, key) for key in KEYS]
        assert chosen.count("m@2") / len(KEYS) == pytest.approx(share, abs=0.02)


def test_raising_a_share_moves_only_conversations_to_it() -> None:
    before = {key: pick({"m@1": 0.9, "m@2": 0.1}, key) for key in KEYS}
    after = {key: pick({"m@1": 0.7, "m@2": 0.3}, key) for key in KEYS}
    assert all(after[key] == "m@2" for key in KEYS if before[key] == "m@2")
    assert sum(before[key] != after[key] for key in KEYS) / len(KEYS) == pytest.approx(0.2, abs=0.03)


def test_a_conversation_keeps_its_key_as_it_grows_and_another_has_another() -> None:
    first = conversation_key(chat("be brief", "hello"), "ann")
    assert conversation_key(chat("be brief", "hello", "hi", "and?", "well"), "ann") == first
    others = [(chat("be brief", "hi"), "ann"), (chat("be long", "hello"), "ann"), (chat("be brief", "hello"), "bob")]
    assert len({first, *(conversation_key(*other) for other in others)}) == 4
    assert conversation_key(Prompt(text="a"), "") != conversation_key(Prompt(text="b"), "")


SHARES = st.dictionaries(st.sampled_from(["m", "m@1", "m@2", "m@3"]), st.floats(0, 1), min_size=1)


@given(present=SHARES, share=st.floats(0, 1))
def test_shares_are_one_together_and_others_keep_their_proportions(present: dict[str, float], share: float) -> None:
    first, *others = sorted(present)
    found = new_shares(present, {first: share if others else 1.0})
    assert sum(found.values()) == pytest.approx(1)
    assert found[first] == (share if others else 1.0)
    for one in others:
        for other in others:
            assert found[one] * present[other] == pytest.approx(found[other] * present[one], abs=1e-6)


@pytest.mark.parametrize(
    ("given_shares", "error"),
    [
        ({"m@1": 1.5}, InvalidValue),
        ({"m@1": float("nan")}, InvalidValue),
        ({"m@1": 0.8, "m@2": 0.3}, InvalidValue),
        ({"m@1": 0.5, "m@2": 0.3}, InvalidValue),
        ({"m@3": 0.5}, UnknownName),
    ],
)
def test_shares_that_cannot_be_are_refused(given_shares: dict[str, float], error: type[Exception]) -> None:
    with pytest.raises(error):
        new_shares({"m@1": 1.0, "m@2": 0.0}, given_shares)


def wanted(source: str, traffic: float | None = None) -> WantedModel:
    return WantedModel(source, ONE_THREAD, DeploymentConfig(), traffic)


def test_versions_of_a_file_without_a_share_divide_the_rest() -> None:
    file = {"m@1": None, "m@2": 0.2, "m@3": None, "n": None}
    assert shares_wanted(file) == {"m": pytest.approx({"m@1": 0.4, "m@2": 0.2, "m@3": 0.4}), "n": {"n": 1.0}}
    with pytest.raises(InvalidValue, match="traffic"):
        shares_wanted({"m@1": 0.5, "m@2": 0.6})


async def load(models: ModelServiceStub, name: str, source: str, **more: Any) -> model_pb2.ModelInfo:
    engine = model_pb2.EngineConfig()
    return (await models.LoadModel(model_pb2.LoadModelRequest(name=name, source=source, engine=engine, **more))).model


async def traffic(models: ModelServiceStub) -> dict[str, float]:
    listed = (await models.ListModels(model_pb2.ListModelsRequest())).models
    return {model.name: round(model.traffic, 6) for model in listed if model.name.startswith("m@")}


async def first_message(stub: InferenceServiceStub, text: str) -> inference_pb2.GenerateResponse:
    first, *_ = [message async for message in stub.Generate(ask(text, "m", max_new_tokens=2))]
    return first


TEXTS = [f"line {'abcdefghijklmnopqrstuvwxyz'[number]} of it" for number in range(24)]


async def test_a_canary_is_loaded_gets_a_share_and_is_rolled_back(
    models: ModelServiceStub, stub: InferenceServiceStub, gateway: Gateway
) -> None:
    assert (await load(models, "m@1", "tiny")).traffic == 1
    assert (await load(models, "m@2", "tiny-linear")).traffic == 0
    assert {(await first_message(stub, text)).model for text in TEXTS} == {"m@1"}
    answer = await models.SetTraffic(model_pb2.SetTrafficRequest(name="m", traffic={"2": 0.5}))
    assert {model.name: model.traffic for model in answer.models} == {"m@1": 0.5, "m@2": 0.5}
    chosen = {text: (await first_message(stub, text)).model for text in TEXTS}
    assert set(chosen.values()) == {"m@1", "m@2"}
    assert {text: (await first_message(stub, text)).model for text in TEXTS} == chosen
    for text, version in list(chosen.items())[:6]:
        named = await complete(stub, ask(text, version, max_new_tokens=12))
        assert await complete(stub, ask(text, "m", max_new_tokens=12)) == named
    metrics = (await gateway.metrics(())).decode()
    for version in ("m@1", "m@2"):
        assert f'attn_generation_tokens_total{{model_name="{version}"' in metrics
        assert f'attn_num_requests_running{{model_name="{version}"' in metrics
    await models.SetTraffic(model_pb2.SetTrafficRequest(name="m", traffic={"1": 1}))
    assert {(await first_message(stub, text)).model for text in TEXTS} == {"m@1"}
    await models.UnloadModel(model_pb2.UnloadModelRequest(name="m@2"))
    assert await traffic(models) == {"m@1": 1}


async def test_a_stream_that_broke_goes_on_with_the_version_that_it_began_with(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    await load(models, "m@1", "tiny")
    await load(models, "m@2", "tiny-linear")
    request = ask("To be", "m", max_new_tokens=20)
    messages = [message async for message in stub.Generate(request)]
    whole = [token.id for message in messages for token in message.tokens]
    assert messages[0].model == "m@1"
    await models.SetTraffic(model_pb2.SetTrafficRequest(name="m", traffic={"2": 1}))
    received = inference_pb2.PartialCompletion(token_ids=whole[:7])
    request.resume.CopyFrom(inference_pb2.Resumption(received=[received], model=messages[0].model))
    assert await complete(stub, request) == whole[7:]
    request.resume.model = "tiny"
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "resume.model"):
        await complete(stub, request)
    request.resume.model = "m@7"
    async with refused(grpc.StatusCode.NOT_FOUND, "m@7"):
        await complete(stub, request)


async def test_an_update_in_place_ends_the_streams_of_the_old_version_first(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    await load(models, "m@1", "tiny")
    alone = await complete(stub, ask("To be", "m", max_new_tokens=200, ignore_eos=True))
    running = [
        asyncio.create_task(complete(stub, ask("To be", "m", max_new_tokens=200, ignore_eos=True))) for _ in range(4)
    ]
    await asyncio.sleep(0)
    updated = await load(models, "m@2", "tiny-linear", replace=True)
    assert updated.traffic == 1
    assert (await first_message(stub, "To be")).model == "m@2"
    assert await asyncio.gather(*running) == [alone] * 4
    names: set[str] = {"m@1"}
    for _ in range(600):
        if "m@1" not in names:
            break
        names = set(await traffic(models))
        await asyncio.sleep(0.1)
    assert names == {"m@2"}


async def test_a_file_changes_versions_without_breaking_a_stream(inference: Any, stub: InferenceServiceStub) -> None:
    fleet = inference.fleet
    await fleet.apply({"m@1": wanted("tiny")}, ())
    alone = await complete(stub, ask("To be", "m", max_new_tokens=200, ignore_eos=True))
    running = asyncio.create_task(complete(stub, ask("To be", "m", max_new_tokens=200, ignore_eos=True)))
    await fleet.apply({"m@1": wanted("tiny"), "m@2": wanted("tiny-linear", 0.25)}, {"m@1"})
    assert {model.name: model.info.traffic for model in fleet.versions("m")} == {"m@1": 0.75, "m@2": 0.25}
    await fleet.apply({"m@2": wanted("tiny-linear")}, {"m@1", "m@2"})
    assert {(await first_message(stub, text)).model for text in TEXTS[:4]} == {"m@2"}
    assert await running == alone
    await until(lambda: [model.name for model in fleet.versions("m")] == ["m@2"], 60)


async def test_what_is_no_version_is_refused_before_anything_is_loaded(models: ModelServiceStub, home: Path) -> None:
    for name in ("m@", "@1", "m@1@2", "m@ 1"):
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "NAME@VERSION"):
            await load(models, name, "tiny")
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "traffic"):
        await load(models, "m@1", "tiny", traffic=0.5)
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "without a version"):
        await models.SetTraffic(model_pb2.SetTrafficRequest(name="tiny@1", traffic={"1": 1}))
    async with refused(grpc.StatusCode.NOT_FOUND, "nobody"):
        await models.SetTraffic(model_pb2.SetTrafficRequest(name="nobody", traffic={"1": 1}))
    assert await traffic(models) == {}
