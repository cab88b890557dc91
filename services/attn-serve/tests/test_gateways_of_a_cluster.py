"""Two gateways on one Ray cluster: versions of a model as deployments, loaded, divided and replaced at either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from asking_inference import ask, complete
from attn.v1 import model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_gateway import Cluster, ClusterSettings, Gateway, serving
from attn_schema import EngineConfig
from attn_serve.service import InferenceGrpc

pytest.importorskip("fastapi", reason="needs attn-serve[replicas]")
pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="module")]
TEXTS = [f"line {letter} of it" for letter in "abcdefghijkl"]


class Joined(Cluster):
    """A Ray cluster that this process is part of already."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(home: Path) -> AsyncIterator[str]:
    """Where the cluster is reached."""
    cluster = Cluster(ClusterSettings(cpus=2, home=home))
    await cluster.start()
    import ray

    yield ray.get_runtime_context().gcs_address
    await cluster.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def gateways(home: Path, address: str) -> AsyncIterator[list[Gateway]]:
    settings = ClusterSettings(address=address, home=home, engine=EngineConfig(num_threads=1))
    async with serving([InferenceGrpc(Joined(settings))]) as a, serving([InferenceGrpc(Joined(settings))]) as b:
        yield [a, b]


async def load(models: ModelServiceStub, name: str, source: str, **more: Any) -> model_pb2.ModelInfo:
    deployment = model_pb2.DeploymentConfig(replicas=1)
    request = model_pb2.LoadModelRequest(name=name, source=source, deployment=deployment, **more)
    return (await models.LoadModel(request)).model


async def listed(models: ModelServiceStub) -> dict[str, tuple[int, float]]:
    found = (await models.ListModels(model_pb2.ListModelsRequest())).models
    return {model.name: (model.state, round(model.traffic, 6)) for model in found}


async def chosen(stub: InferenceServiceStub) -> dict[str, str]:
    found = {}
    for text in TEXTS:
        messages = [message async for message in stub.Generate(ask(text, "m", max_new_tokens=2))]
        found[text] = messages[0].model
    return found


async def settled(look: Callable[[], Awaitable[bool]]) -> None:
    """Return once something is so; raises `TimeoutError`."""
    async with asyncio.timeout(120):
        while True:
            if await look():
                return
            await asyncio.sleep(0.1)


async def lists(models: ModelServiceStub, wanted: dict[str, float]) -> None:
    """Return once these models serve with these shares, and no others are there."""
    expected = {name: (model_pb2.MODEL_STATE_SERVING, share) for name, share in wanted.items()}

    async def look() -> bool:
        return await listed(models) == expected

    await settled(look)


async def test_versions_on_replicas_are_canaries_and_replaced_at_either_gateway(gateways: list[Gateway]) -> None:
    import ray
    from ray import serve

    async with (
        grpc.aio.insecure_channel(gateways[0].address) as one,
        grpc.aio.insecure_channel(gateways[1].address) as two,
    ):
        a, b = ModelServiceStub(one), ModelServiceStub(two)
        ask_a, ask_b = InferenceServiceStub(one), InferenceServiceStub(two)
        first, again = await asyncio.gather(load(a, "m@1", "tiny"), load(b, "m@1", "tiny"))
        assert first.mechanisms == again.mechanisms == ["attn-variants/mha"]
        assert (await load(b, "m@2", "tiny-linear", traffic=0.5)).traffic == 0.5
        for models in (a, b):
            await lists(models, {"m@1": 0.5, "m@2": 0.5})
        assert set(serve.status().applications) == {"attn-m@1", "attn-m@2"}
        found = await chosen(ask_a)
        assert set(found.values()) == {"m@1", "m@2"}
        assert await chosen(ask_b) == found
        for text, version in found.items():
            named = await complete(ask_a, ask(text, version, max_new_tokens=8))
            assert await complete(ask_b, ask(text, "m", max_new_tokens=8)) == named
        await a.SetTraffic(model_pb2.SetTrafficRequest(name="m", traffic={"1": 1}))
        await lists(b, {"m@1": 1.0, "m@2": 0.0})
        assert set((await chosen(ask_b)).values()) == {"m@1"}
        await a.UnloadModel(model_pb2.UnloadModelRequest(name="m@2"))
        await lists(b, {"m@1": 1.0})
        await load(b, "m@3", "tiny-linear", replace=True)
        for models in (a, b):
            await lists(models, {"m@3": 1.0})
        assert set((await chosen(ask_a)).values()) == {"m@3"}
        scale = model_pb2.ScaleModelRequest(name="m@3", deployment=model_pb2.DeploymentConfig(replicas=2))
        await a.ScaleModel(scale)

        async def both() -> bool:
            return (await b.GetModel(model_pb2.GetModelRequest(name="m@3"))).model.replicas == 2

        await settled(both)
        await b.UnloadModel(model_pb2.UnloadModelRequest(name="m"))
        await lists(a, {})
        assert not serve.status().applications
        assert ray.is_initialized()
