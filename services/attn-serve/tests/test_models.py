"""Loading and unloading models while others are served."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import grpc
import pytest
from asking_inference import ask, complete, refused
from attn.v1 import model_pb2 as wire
from attn.v1.inference_pb2 import GetEngineStatsRequest
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_core import installed


def load(name: str, source: str = "", **engine: object) -> wire.LoadModelRequest:
    return wire.LoadModelRequest(name=name, source=source, engine=wire.EngineConfig(**engine))  # type: ignore[arg-type]


async def test_a_model_says_what_it_is(models: ModelServiceStub) -> None:
    model = (await models.GetModel(wire.GetModelRequest(name="tiny"))).model
    assert (model.max_seq_len, model.num_layers, model.num_heads, model.dtype) == (256, 2, 4, "float32")
    assert model.state == wire.MODEL_STATE_SERVING
    assert model.num_parameters > 10_000
    assert not model.chat


async def test_an_unloaded_model_is_gone_and_can_be_loaded_again(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    before = await complete(stub, ask(max_new_tokens=10))
    await models.UnloadModel(wire.UnloadModelRequest(name="tiny"))
    async with refused(grpc.StatusCode.NOT_FOUND, "tiny"):
        await complete(stub, ask(max_new_tokens=10))
    await models.LoadModel(load("tiny"))
    assert await complete(stub, ask(max_new_tokens=10)) == before


async def test_a_completion_that_runs_is_finished_before_its_model_goes(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    messages = aiter(stub.Generate(ask(max_new_tokens=200)))
    first = await anext(messages)
    unloading = asyncio.ensure_future(models.UnloadModel(wire.UnloadModelRequest(name="tiny", shutdown_timeout=30)))
    rest = [token async for message in messages for token in message.tokens]
    assert len(first.tokens) + len(rest) == 200
    await unloading


async def test_loading_the_same_source_twice_is_one_model_and_another_source_is_refused(
    models: ModelServiceStub,
) -> None:
    first = await models.LoadModel(load("tiny"))
    assert first.model.state == wire.MODEL_STATE_SERVING
    async with refused(grpc.StatusCode.ALREADY_EXISTS, "tiny"):
        await models.LoadModel(load("tiny", "tiny-linear"))
    assert [model.name for model in (await models.ListModels(wire.ListModelsRequest())).models] == ["tiny"]


@pytest.mark.parametrize("quantization", ["none", "float32", "bfloat16", "int8", "int4"])
async def test_a_model_is_served_with_its_weights_kept_as_asked(
    models: ModelServiceStub, stub: InferenceServiceStub, quantization: str
) -> None:
    loaded = (await models.LoadModel(load("packed", "tiny", quantization=quantization))).model
    assert loaded.num_parameters == (await models.GetModel(wire.GetModelRequest(name="tiny"))).model.num_parameters
    assert (loaded.dtype, loaded.quantization) == ("float32", quantization)
    messages = await complete(stub, ask(max_new_tokens=5, model="packed"))
    assert messages


async def test_unasked_weights_are_packed_as_they_are_stored_where_that_loses_nothing(models: ModelServiceStub) -> None:
    lossless = [kernel for kernel in installed().linears if kernel.weights == "float32" and kernel.exact]
    kept = "float32" if any(kernel.available() is None for kernel in lossless) else "none"
    assert (await models.GetModel(wire.GetModelRequest(name="tiny"))).model.quantization == kept
    assert (await models.LoadModel(load("same", "tiny", quantization="auto"))).model.quantization == kept


async def test_weights_that_nobody_can_keep_are_refused_with_those_that_can_be(models: ModelServiceStub) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "int8"):
        await models.LoadModel(load("packed", "tiny", quantization="int3"))


async def test_an_unknown_model_is_refused_with_the_names_there_are(models: ModelServiceStub) -> None:
    async with refused(grpc.StatusCode.NOT_FOUND, "tiny-linear"):
        await models.LoadModel(load("tiny-liner"))


@pytest.mark.parametrize("name", ["", "../tiny", "a b", "x\ny", "a" * 129])
async def test_a_name_that_is_no_name_is_refused(models: ModelServiceStub, name: str) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "name"):
        await models.LoadModel(load(name, "tiny"))


async def test_a_folder_that_is_no_model_is_refused_and_the_name_stays_free(
    models: ModelServiceStub, home: Path, tmp_path: Path
) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "config.json"):
        await models.LoadModel(load("mine", str(tmp_path)))
    broken = tmp_path / "broken"
    shutil.copytree(home / "models" / "tiny", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "model.safetensors"):
        await models.LoadModel(load("mine", str(broken)))
    await models.LoadModel(load("mine", str(home / "models" / "tiny")))


async def test_a_config_that_asks_for_a_mechanism_nobody_has_installed_says_so(
    models: ModelServiceStub, home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "alien"
    shutil.copytree(home / "models" / "tiny", folder)
    (folder / "manifest.json").unlink()
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(text.replace("attn-variants/mha", "warp-drive"))))
    async with refused(grpc.StatusCode.NOT_FOUND, "warp-drive"):
        await models.LoadModel(load("alien", str(folder)))


async def test_engine_options_that_cannot_be_are_refused_by_name(models: ModelServiceStub) -> None:
    async with refused(grpc.StatusCode.NOT_FOUND, "flux-capacitor"):
        await models.LoadModel(load("other", "tiny", kernel="flux-capacitor"))
    async with refused(grpc.StatusCode.NOT_FOUND, "float3"):
        await models.LoadModel(load("other", "tiny", dtype="float3"))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "device"):
        await models.LoadModel(load("other", "tiny", device="tpu"))
    async with refused(grpc.StatusCode.NOT_FOUND, "int7", "int8"):
        await models.LoadModel(load("other", "tiny", kv_cache="int7"))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "kv_cache_memory_bytes"):
        await models.LoadModel(load("other", "tiny", kv_cache_memory_bytes=10))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "shutdown_timeout"):
        await models.UnloadModel(wire.UnloadModelRequest(name="tiny", shutdown_timeout=float("nan")))


async def test_a_model_that_guesses_ahead_does_so_for_requests_that_do_not_say(
    stub: InferenceServiceStub, models: ModelServiceStub
) -> None:
    await models.LoadModel(load("guessing", "tiny", num_speculative_tokens=5))
    text = "to be or not to be or not to be"
    before = (await stub.GetEngineStats(GetEngineStatsRequest(model="tiny"))).draft_tokens
    guessed = await complete(stub, ask(text, model="guessing", max_new_tokens=40))
    assert guessed == await complete(stub, ask(text, max_new_tokens=40))
    assert (await stub.GetEngineStats(GetEngineStatsRequest(model="guessing"))).draft_tokens > 0
    assert (await stub.GetEngineStats(GetEngineStatsRequest(model="tiny"))).draft_tokens == before
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "num_speculative_tokens", "33"):
        await models.LoadModel(load("more", "tiny", num_speculative_tokens=33))
    await models.UnloadModel(wire.UnloadModelRequest(name="guessing"))


async def test_a_cache_of_fewer_bits_holds_more_tokens_in_the_same_memory_and_answers(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    totals = {}
    for cache in ("shared", "int8"):
        await models.LoadModel(load(cache, "tiny", kv_cache=cache, kv_cache_memory_bytes=2**16, max_num_seqs=2))
        assert await complete(stub, ask(model=cache, max_new_tokens=20))
        totals[cache] = (await stub.GetEngineStats(GetEngineStatsRequest(model=cache))).kv_tokens_total
    assert totals["int8"] > 2 * totals["shared"]


async def test_a_named_kernel_computes_the_same(models: ModelServiceStub, stub: InferenceServiceStub) -> None:
    await models.LoadModel(load("plain", "tiny", kernel="plain"))
    chosen = await complete(stub, ask(max_new_tokens=20))
    assert await complete(stub, ask(model="plain", max_new_tokens=20)) == chosen


@pytest.mark.parametrize("source", ["/" + "x/" * 2500, "/" + "x" * 5000, "~nobody-here/x", "/\x00"])
async def test_a_source_that_can_be_no_path_is_refused_as_one_that_is_not_there(
    models: ModelServiceStub, source: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await models.LoadModel(wire.LoadModelRequest(name="odd", source=source))
    assert caught.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
