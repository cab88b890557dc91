"""LoRA adapters of one model: loaded by name, batched together, each as its merged model answers."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import gguf
import grpc
import pytest
import torch
from asking_inference import ask, complete, refused
from attn.v1 import model_pb2 as wire
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_engine.client import TextTask
from attn_engine.in_process import InProcess
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_schema import EngineConfig, Prompt, SamplingParams
from low_rank import make_adapter

NAMES = ("first", "second")


@pytest.fixture(scope="session", autouse=True)
def adapters(home: Path) -> None:
    for base, prefix in (("tiny", ""), ("tiny-linear", "linear-")):
        for seed, name in enumerate(NAMES):
            make_adapter(home / "models" / base, prefix + name, seed)


async def load(models: ModelServiceStub, name: str, source: str = "", base: str = "", **engine) -> wire.ModelInfo:
    request = wire.LoadModelRequest(
        name=name, source=source, base_model=base, engine=wire.EngineConfig(**engine) if engine else None
    )
    return (await models.LoadModel(request)).model


PROMPTS = ("To be", "or not", "To be or not to be that is", "a", "Whether tis nobler")


@pytest.mark.parametrize(("base", "prefix"), [("tiny", ""), ("tiny-linear", "linear-")])
@pytest.mark.parametrize("stored", ["auto", "none"])
async def test_requests_of_several_adapters_in_one_batch_are_answered_as_by_merged_models(
    models: ModelServiceStub, stub: InferenceServiceStub, base: str, prefix: str, stored: str
) -> None:
    await load(models, "base", base, quantization=stored)
    names = ["base"]
    for name in NAMES:
        await load(models, prefix + name, base="base")
        await load(models, f"{prefix}{name}-merged", quantization=stored)
        names.append(prefix + name)
    asked = [(name, prompt) for prompt in PROMPTS for name in names]
    wanted = {"temperature": 0.0, "max_new_tokens": 24}
    together = await asyncio.gather(*(complete(stub, ask(text, name, **wanted)) for name, text in asked))
    for (name, text), given in zip(asked, together, strict=True):
        alone = name if name == "base" else f"{name}-merged"
        assert given == await complete(stub, ask(text, alone, **wanted)), (name, text)
    assert len({tuple(given) for (_, text), given in zip(asked, together, strict=True) if text == "To be"}) == 3


async def test_what_one_adapter_computed_of_a_prompt_is_not_taken_by_another(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    await load(models, "first")
    prompt = "To be or not to be that is the question whether tis nobler in the mind to suffer"
    wanted = {"temperature": 0.0, "max_new_tokens": 8}
    plain = await complete(stub, ask(prompt, "tiny", **wanted))
    adapted = await complete(stub, ask(prompt, "first", **wanted))
    messages = [message async for message in stub.Generate(ask(prompt, "first", **wanted))]
    assert messages[-1].usage.cached_tokens > 0, "its own prefix is found again"
    assert [token.id for message in messages for token in message.tokens] == adapted
    assert await complete(stub, ask(prompt, "tiny", **wanted)) == plain != adapted
    # Another adapter under the name of one that was unloaded finds nothing of it.
    await models.UnloadModel(wire.UnloadModelRequest(name="first"))
    await load(models, "first", "second")
    messages = [message async for message in stub.Generate(ask(prompt, "first", **wanted))]
    assert messages[-1].usage.cached_tokens == 0


async def test_adapters_are_listed_and_unloaded_and_go_with_their_model(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    info = await load(models, "first")
    assert (info.base_model, info.source, info.state) == ("tiny", "first", wire.MODEL_STATE_SERVING)
    listed = (await models.ListModels(wire.ListModelsRequest())).models
    assert [(model.name, model.base_model) for model in listed] == [("first", "tiny"), ("tiny", "")]
    running = aiter(stub.Generate(ask(model="first", max_new_tokens=100)))
    await anext(running)
    await models.UnloadModel(wire.UnloadModelRequest(name="first"))
    assert len([token async for message in running for token in message.tokens]) > 80, "what runs goes on"
    async with refused(grpc.StatusCode.NOT_FOUND, "first"):
        await complete(stub, ask(model="first"))
    await load(models, "second")
    await models.UnloadModel(wire.UnloadModelRequest(name="tiny"))
    assert not (await models.ListModels(wire.ListModelsRequest())).models


async def test_files_that_were_overwritten_in_place_are_never_taken_for_those_that_are_served(
    models: ModelServiceStub, stub: InferenceServiceStub, home: Path
) -> None:
    """An adapter, and a whole model: a repeated load is refused until the old one is unloaded; then it is the new."""
    for name, seed in (("changing", 1), ("changed", 2)):
        make_adapter(home / "models" / "tiny", name, seed)
    for suffix in ("", "-merged"):
        name, new = f"changing{suffix}", f"changed{suffix}"
        for each in (name, new):
            await load(models, each)
        before, after = [await complete(stub, ask(model=each, max_new_tokens=12)) for each in (name, new)]
        assert before != after
        await load(models, name)
        for file in (home / "models" / new).iterdir():
            (home / "models" / name / file.name).write_bytes(file.read_bytes())
        async with refused(grpc.StatusCode.ALREADY_EXISTS, name):
            await load(models, name)
        await models.UnloadModel(wire.UnloadModelRequest(name=name))
        await load(models, name)
        assert await complete(stub, ask(model=name, max_new_tokens=12)) == after


async def test_adapters_that_do_not_fit_are_refused_and_the_model_goes_on(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    before = await complete(stub, ask(max_new_tokens=10))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "whose weights are not those of tiny"):
        await load(models, "linear-first", base="tiny")
    async with refused(grpc.StatusCode.NOT_FOUND, "unknown model 'tinny'"):
        await load(models, "first", base="tinny")
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "as the source is not an adapter"):
        await load(models, "tiny-linear", base="tiny")
    await load(models, "small", "tiny-linear", max_loras=1)
    async with refused(grpc.StatusCode.NOT_FOUND, "no-such-adapter"):
        await load(models, "no-such-adapter", base="tiny")
    await load(models, "linear-first", base="small")
    async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "max_loras"):
        await load(models, "linear-second", base="small")
    await load(models, "encoder", "tiny-bert")
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "only decoders support adapters"):
        await load(models, "first", base="encoder")
    assert await complete(stub, ask(max_new_tokens=10)) == before
    names = [model.name for model in (await models.ListModels(wire.ListModelsRequest())).models]
    assert names == ["encoder", "linear-first", "small", "tiny"]


async def test_beams_samples_and_drafts_of_an_adapter_are_those_of_its_merged_model(home: Path) -> None:
    config = EngineConfig(num_threads=1)
    folder = home / "models"
    base, merged = (InProcess(folder / name, config) for name in ("tiny", "first-merged"))
    await base.start()
    await merged.start()
    await base.load_adapter("first", folder / "first")
    try:
        for params in (
            SamplingParams(max_new_tokens=16, num_beams=3, temperature=0.0),
            SamplingParams(max_new_tokens=24, temperature=0.9, seed=3, n=2),
            SamplingParams(max_new_tokens=24, temperature=0.0, num_speculative_tokens=3),
        ):
            given = []
            for engine, adapter in ((base, "first"), (merged, "")):
                task = TextTask(prompt=Prompt(text="To be or To be or"), params=params, adapter=adapter)
                given.append(sorted([(d.index, t.id) async for d in engine.generate(task) for t in d.tokens]))
            assert given[0] == given[1], params
    finally:
        await base.stop(0)
        await merged.stop(0)


async def test_an_adapter_in_a_gguf_file_is_served_as_merged_weights(
    models: ModelServiceStub, stub: InferenceServiceStub, home: Path, tmp_path: Path
) -> None:
    tiny = load_model(home / "models" / "tiny")
    torch.manual_seed(5)
    llama = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "bias": False, "mechanism": "gqa"}
    model = Decoder(dataclasses.replace(tiny.config, **llama, num_kv_heads=None, tie_word_embeddings=False))
    save_model(home / "models" / "llama", model, tiny.tokenizer, layout="llama")
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 4.0)
    for layer, block in enumerate(model.blocks):
        value = block.attention.value.weight
        down, up = torch.randn(2, value.shape[1]), torch.randn(len(value), 2)
        value.data += 4.0 / 2 * up @ down
        for leaf, factor in (("lora_a", down), ("lora_b", up)):
            writer.add_tensor(f"blk.{layer}.attn_v.weight.{leaf}", factor.numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    save_model(home / "models" / "llama-merged", model, tiny.tokenizer, layout="llama")
    await load(models, "llama", quantization="none")
    await load(models, "llama-merged", quantization="none")
    await load(models, "from-gguf", str(tmp_path / "adapter.gguf"), base="llama")
    wanted = {"temperature": 0.0, "max_new_tokens": 24}
    plain, given, merged = [
        await complete(stub, ask("To be", name, **wanted)) for name in ("llama", "from-gguf", "llama-merged")
    ]
    assert given == merged != plain
