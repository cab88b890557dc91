"""Models belong to a tenant or to all; to other tenants they do not exist."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from asking_inference import ask, refused
from attn.v1 import common_pb2, inference_pb2, model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_core.errors import AlreadyExists, InvalidValue, PermissionDenied, Unauthenticated, Unavailable, UnknownName
from attn_gateway import Gateway, GatewaySettings, read_tenants, serving
from attn_gateway.policies.limits import Limits, TenantUse
from attn_gateway.records import ArtifactStore, Database, ModelRecord, ModelRecords
from attn_models.weights.manifest import fingerprint
from attn_schema import EngineConfig
from attn_serve.served_models import ServedModels
from attn_serve.sources import ModelSources
from low_rank import make_adapter

TOKENS = (
    "op\none tenant=ann\ntwo tenant=bob\nspare tenant=ann\nfew tenant=eve tokens_per_minute=60\n"
    "tight tenant=tim tokens_per_minute=60 max_models=1\nsmall tenant=sue max_memory_bytes=1e9\n"
)


@pytest.fixture
async def gateway(inference: Any, tmp_path: Path) -> AsyncIterator[Gateway]:
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    file.chmod(0o600)
    assert read_tenants(file)["op"].is_admin
    async with serving([inference], GatewaySettings(port=0, token_file=file)) as running:
        yield running


def by(token: str) -> dict[str, Any]:
    return {"metadata": (("authorization", f"Bearer {token}"),)}


async def names(models: ModelServiceStub, token: str) -> list[str]:
    answer = await models.ListModels(model_pb2.ListModelsRequest(), **by(token))
    return [model.name for model in answer.models]


def load(name: str, source: str = "tiny") -> model_pb2.LoadModelRequest:
    return model_pb2.LoadModelRequest(name=name, source=source)


async def test_a_model_of_one_tenant_does_not_exist_for_another(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    await models.LoadModel(load("mine"), **by("one"))
    assert await names(models, "one") == await names(models, "spare") == await names(models, "op") == ["mine", "tiny"]
    assert await names(models, "two") == ["tiny"]
    request = ask(model="mine", max_new_tokens=3)
    assert [message async for message in stub.Generate(request, **by("spare"))]
    told = set()
    for name in ("mine", "fine"):
        for call in (
            lambda name=name: models.GetModel(model_pb2.GetModelRequest(name=name), **by("two")),
            lambda name=name: models.UnloadModel(model_pb2.UnloadModelRequest(name=name), **by("two")),
            lambda name=name: stub.Tokenize(
                inference_pb2.TokenizeRequest(model=name, prompt=request.prompt), **by("two")
            ),
            lambda name=name: stub.GetEngineStats(inference_pb2.GetEngineStatsRequest(model=name), **by("two")),
            lambda name=name: stub.Generate(ask(model=name), **by("two")).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            told.add(caught.value.details().replace(name, "NAME"))
    assert len(told) == 1


async def test_the_same_name_may_be_two_tenants_own_model(models: ModelServiceStub, stub: InferenceServiceStub) -> None:
    await models.LoadModel(load("mine", "tiny"), **by("one"))
    await models.LoadModel(load("mine", "tiny-linear"), **by("two"))
    for token, mechanism in (("one", "mha"), ("two", "linear")):
        found = (await models.GetModel(model_pb2.GetModelRequest(name="mine"), **by(token))).model
        assert found.mechanisms == [f"attn-variants/{mechanism}"]
    await models.UnloadModel(model_pb2.UnloadModelRequest(name="mine"), **by("two"))
    assert (await names(models, "two"), await names(models, "one")) == (["tiny"], ["mine", "tiny"])


async def test_everybodys_models_are_used_by_all_and_unloaded_by_admins(models: ModelServiceStub) -> None:
    async with refused(grpc.StatusCode.PERMISSION_DENIED, "admins"):
        await models.UnloadModel(model_pb2.UnloadModelRequest(name="tiny"), **by("one"))
    await models.LoadModel(load("common"), **by("op"))
    assert "common" in await names(models, "two")
    await models.UnloadModel(model_pb2.UnloadModelRequest(name="common"), **by("op"))
    assert await names(models, "two") == ["tiny"]


async def test_paths_on_the_server_are_for_admins(models: ModelServiceStub, home: Path) -> None:
    folder = str(home / "models" / "tiny")
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "admins"):
        await models.LoadModel(load("there", folder), **by("one"))
    await models.LoadModel(load("there", folder), **by("op"))


async def test_tokens_of_prompts_and_completions_count_against_the_limit_of_a_tenant(
    stub: InferenceServiceStub,
) -> None:
    assert [m async for m in stub.Generate(ask("x" * 40, max_new_tokens=20), **by("few"))]
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "tokens_per_minute=60"):
        await stub.Generate(ask(max_new_tokens=1), **by("few")).read()
    assert [m async for m in stub.Generate(ask(max_new_tokens=1), **by("one"))]


PROMPT = "x" * 40
ENCODED = common_pb2.Prompt(text=PROMPT)
COMPUTING = {
    "Generate": lambda stub, model: stub.Generate(ask(PROMPT, model=model, max_new_tokens=20), **by("tight")).read(),
    "Score": lambda stub, model: stub.Score(
        inference_pb2.ScoreRequest(model=model, prompts=[ENCODED] * 9), **by("tight")
    ),
    "Embed": lambda stub, model: stub.Embed(
        inference_pb2.EmbedRequest(model=model, texts=["abcdabcd"] * 5), **by("tight")
    ),
    "AttentionMaps": lambda stub, model: stub.AttentionMaps(
        inference_pb2.AttentionMapsRequest(model=model, prompt=ENCODED), **by("tight")
    ).read(),
}
"""A call of each method that computes with a model."""
FREE = {"Tokenize", "GetEngineStats"}


def test_every_method_of_inference_is_known_to_compute_or_not() -> None:
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
    assert {method.name for method in service.methods} == COMPUTING.keys() | FREE


def use_of(gateway: Gateway) -> TenantUse:
    """The use of the limits of the tenant with the token `tight`."""
    found = [each for each in gc.get_objects() if type(each) is Limits and each._tenants is gateway.tenants]
    return found[0].use_of("tim")


def level(gateway: Gateway) -> float:
    """The tokens that the tenant may still use."""
    use = use_of(gateway)
    use._tokens.wait(0.0)
    return use._tokens._level


@pytest.mark.parametrize("method", COMPUTING)
async def test_a_call_that_computes_is_refused_over_the_limit(
    gateway: Gateway, stub: InferenceServiceStub, method: str
) -> None:
    use_of(gateway).spend(10_000)
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "tokens_per_minute"):
        await COMPUTING[method](stub, "tiny")


@pytest.mark.parametrize("method", COMPUTING)
async def test_a_call_that_computes_is_charged(
    gateway: Gateway, models: ModelServiceStub, stub: InferenceServiceStub, method: str
) -> None:
    model = "tiny-bert" if method == "Embed" else "tiny"
    await models.LoadModel(load(model, model), **by("op"))
    before = level(gateway)
    await COMPUTING[method](stub, model)
    await asyncio.sleep(0.1)
    assert level(gateway) < before - len(PROMPT) / 8


async def test_a_caller_that_hangs_up_pays_for_what_was_computed(gateway: Gateway, stub: InferenceServiceStub) -> None:
    before, most = level(gateway), 200
    call = stub.Generate(ask(PROMPT, max_new_tokens=most, ignore_eos=True), **by("tight"))
    await call.read()
    assert level(gateway) < before - most / 2, "nothing was reserved"
    call.cancel()
    while use_of(gateway).running:  # noqa: ASYNC110 -- the gateway has no event for it
        await asyncio.sleep(0.05)
    assert level(gateway) < before - len(PROMPT) / 8, "what was computed is not charged"


async def test_a_call_that_is_refused_costs_nothing(gateway: Gateway, stub: InferenceServiceStub) -> None:
    before = level(gateway)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Generate(ask(PROMPT, max_new_tokens=300, model="nothing"), **by("tight")).read()
    assert level(gateway) >= before


async def test_a_tenant_loads_as_many_models_as_it_may(models: ModelServiceStub) -> None:
    await models.LoadModel(load("mine"), **by("tight"))
    await models.LoadModel(load("mine"), **by("tight"))
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "maximum"):
        await models.LoadModel(load("more"), **by("tight"))
    await models.LoadModel(load("more"), **by("one"))
    await models.UnloadModel(model_pb2.UnloadModelRequest(name="mine"), **by("tight"))
    await models.LoadModel(load("more"), **by("tight"))


@pytest.mark.parametrize(
    "engine",
    [{"kv_cache_memory_bytes": 2**50}, {"kv_offload_bytes": 2**50}, {"kv_cache_memory_bytes": 2**37}],
)
async def test_models_of_a_tenant_take_no_more_memory_than_it_may(
    gateway: Gateway, models: ModelServiceStub, engine: dict[str, int]
) -> None:
    assert gateway.tenants.named("ann").max_memory_bytes < 2**37
    request = model_pb2.LoadModelRequest(name="huge", source="tiny", engine=model_pb2.EngineConfig(**engine))
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "max_memory_bytes"):
        await models.LoadModel(request, **by("one"))
    assert await names(models, "one") == ["tiny"]


async def test_the_memory_of_all_models_and_engines_of_a_tenant_counts(models: ModelServiceStub) -> None:
    await models.LoadModel(load("first"), **by("small"))
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "max_memory_bytes"):
        await models.LoadModel(load("second"), **by("small"))
    three = model_pb2.ScaleModelRequest(name="first", deployment=model_pb2.DeploymentConfig(replicas=3))
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "max_memory_bytes"):
        await models.ScaleModel(three, **by("small"))
    await models.UnloadModel(model_pb2.UnloadModelRequest(name="first"), **by("small"))
    await models.LoadModel(load("second"), **by("small"))


async def test_metrics_of_all_tenants_are_for_admins(gateway: Gateway) -> None:
    with pytest.raises(PermissionDenied):
        await gateway.metrics(by("one")["metadata"])
    with pytest.raises(Unauthenticated):
        await gateway.metrics(())
    assert b"attn_" in await gateway.metrics(by("op")["metadata"])


async def test_an_adapter_of_one_tenant_does_not_exist_for_another(
    models: ModelServiceStub, stub: InferenceServiceStub, home: Path
) -> None:
    for seed, name in enumerate(("of-ann", "of-bob")):
        make_adapter(home / "models" / "tiny", name, seed)

    async def answer(token: str) -> list[int]:
        calls = stub.Generate(ask(model="tuned", max_new_tokens=12), **by(token))
        return [token.id async for message in calls for token in message.tokens]

    await models.LoadModel(load("tuned", "of-ann"), **by("one"))
    anns = await answer("one")
    for call in (
        lambda: stub.Generate(ask(model="tuned"), **by("two")).read(),
        lambda: models.UnloadModel(model_pb2.UnloadModelRequest(name="tuned"), **by("two")),
        lambda: models.GetModel(model_pb2.GetModelRequest(name="tuned"), **by("two")),
    ):
        async with refused(grpc.StatusCode.NOT_FOUND, "tuned"):
            await call()
    await models.LoadModel(load("tuned", "of-bob"), **by("two"))
    assert await answer("two") != anns
    assert (await names(models, "one"), await names(models, "two")) == (["tiny", "tuned"], ["tiny", "tuned"])
    listed = await models.ListModels(model_pb2.ListModelsRequest(with_local=True), **by("one"))
    assert {"tiny", "tiny-linear"} <= set(listed.local_models)
    await models.UnloadModel(model_pb2.UnloadModelRequest(name="tuned"), **by("two"))
    assert await answer("one") == await answer("spare") == anns
    await models.UnloadModel(model_pb2.UnloadModelRequest(name="tuned"), **by("one"))
    async with refused(grpc.StatusCode.NOT_FOUND, "tuned"):
        await answer("one")


async def test_every_name_and_link_of_a_tenants_model_is_hidden_from_others(home: Path, tmp_path: Path) -> None:
    (home / "models" / "x--y").mkdir()
    (home / "models" / "x--y" / "config.json").write_text("{}")
    (home / "models" / "alias").symlink_to("x--y")
    with Database(f"sqlite:///{tmp_path}/records.sqlite3") as database:
        records = ModelRecords(database)
        records.record(ModelRecord("x--y", "ann"))
        sources = ModelSources(home, records)
        for name in ("x/y", "alias"):
            assert await sources.find(name, "ann") == home / "models" / name.replace("/", "--")
            with pytest.raises(UnknownName):
                await sources.find(name, "bob")
        assert await sources.find("tiny", "bob") == home / "models" / "tiny"
        assert set(await sources.names("ann")) - set(await sources.names("bob")) == {"x/y", "alias"}


async def test_a_path_is_read_for_longer_than_the_database_may_take(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_gateway.records.database.ANSWER_SECONDS", 0.0)
    with Database(f"sqlite:///{tmp_path}/records.sqlite3") as database:
        sources, path = ModelSources(home, ModelRecords(database)), home / "models" / "tiny"
        with pytest.raises(Unavailable):
            await sources.find("tiny")
        assert await sources.find(str(path)) == path


async def test_an_artifact_published_anew_is_never_taken_for_the_one_that_is_served(
    home: Path, tmp_path: Path, inference: Any
) -> None:
    for name in ("tiny", "tiny-linear"):
        shutil.copytree(home / "models" / name, tmp_path / name)
    store = ArtifactStore(f"file://{tmp_path}/store", tmp_path / "cache")
    with Database(f"sqlite:///{tmp_path}/records.sqlite3") as database:
        records = ModelRecords(database)
        records.record(ModelRecord("trained", "", artifact="trained"))
        served = ServedModels(ModelSources(tmp_path / "home", records, store), inference._make)
        store.publish("trained", tmp_path / "tiny", "ann")
        first = await served.load("trained", "", EngineConfig(num_threads=1))
        assert await served.load("trained", "", EngineConfig(num_threads=1)) is first
        store.publish("trained", tmp_path / "tiny-linear", "ann")
        with pytest.raises(AlreadyExists):
            await served.load("trained", "", EngineConfig(num_threads=1))
        assert fingerprint(first.folder) == first.fingerprint, "what is served stays as it is"
        await served.unload("trained", 0)
        assert (await served.load("trained", "", EngineConfig(num_threads=1))).info.mechanisms != first.info.mechanisms
        await served.stop(0)


async def test_trained_models_are_found_by_their_owner_on_any_machine(home: Path, tmp_path: Path) -> None:
    """Two homes stand for two machines that share records and artefacts."""
    with Database(f"sqlite:///{tmp_path}/records.sqlite3") as database:
        records = ModelRecords(database)
        url = f"file://{tmp_path}/store"
        ArtifactStore(url, tmp_path / "first").publish("tiny", home / "models" / "tiny", "ann")
        records.record(ModelRecord("tiny", "ann", artifact="tiny"))
        other = ModelSources(tmp_path / "other-home", records, ArtifactStore(url, tmp_path / "second"))
        for tenant in ("ann", None):
            assert (await other.find("tiny", tenant) / "config.json").read_bytes() == (
                home / "models" / "tiny" / "config.json"
            ).read_bytes()
        for sources in (other, ModelSources(home, records)):
            with pytest.raises(UnknownName) as caught:
                await sources.find("tiny", "bob")
            assert "did you mean 'tiny'" not in caught.value.message
        with pytest.raises(InvalidValue):
            await other.find("~/models", "bob")
