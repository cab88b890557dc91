"""Models that guess for others, and states that wait outside, as a server is asked to have them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
from asking_inference import ask, complete, refused
from attn.v1 import model_pb2 as wire
from attn.v1.inference_pb2 import GetEngineStatsRequest
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import DecoderConfig


def load(name: str, source: str, **engine: Any) -> wire.LoadModelRequest:
    return wire.LoadModelRequest(name=name, source=source, engine=wire.EngineConfig(**engine))


async def test_a_draft_changes_no_token_and_its_guesses_are_counted(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    await models.LoadModel(load("itself", "tiny", draft_model="tiny"))
    await models.LoadModel(
        load("another", "tiny", draft_model="tiny-linear", num_speculative_tokens=2, kv_cache="paged")
    )
    for sampling in ({}, {"temperature": 1.5, "seed": 7}):
        alone = await complete(stub, ask(max_new_tokens=40, **sampling))
        for name in ("itself", "another"):
            assert await complete(stub, ask(model=name, max_new_tokens=40, **sampling)) == alone
    own = await stub.GetEngineStats(GetEngineStatsRequest(model="itself"))
    assert own.accepted_tokens == own.draft_tokens > 40
    other = await stub.GetEngineStats(GetEngineStatsRequest(model="another"))
    assert other.draft_tokens > other.accepted_tokens


async def test_guesses_that_branch_change_no_token_and_a_model_of_sums_says_that_it_has_none(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    """A tree where rows are remembered, a chain and a note where only sums are."""
    tree = await models.LoadModel(load("tree", "tiny", draft_model="tiny-linear", speculative_tree_width=3))
    chain = await models.LoadModel(load("chain", "tiny-linear", num_speculative_tokens=3, speculative_tree_width=3))
    assert tree.model.note == ""
    assert "draft tokens form chains, not trees" in chain.model.note
    assert "fixed size" in chain.model.note
    for name, source in (("tree", "tiny"), ("chain", "tiny-linear")):
        await models.LoadModel(load(source, source))
        for sampling in ({}, {"temperature": 1.5, "seed": 7}):
            alone = await complete(stub, ask(model=source, max_new_tokens=40, **sampling))
            assert await complete(stub, ask(model=name, max_new_tokens=40, **sampling)) == alone
    load_now = await stub.GetEngineStats(GetEngineStatsRequest(model="tree"))
    assert load_now.draft_tokens > load_now.accepted_tokens > 0
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "speculative_tree_width", "1 to 8"):
        await models.LoadModel(load("bushy", "tiny", speculative_tree_width=9))


async def test_a_draft_of_other_tokens_or_none_at_all_is_refused(models: ModelServiceStub, tmp_path: Path) -> None:
    other = character_tokenizer("abcdefgh")
    config = DecoderConfig(vocab_size=other.vocab_size, max_seq_len=64, hidden_size=16, num_layers=1, num_heads=2)
    save_model(tmp_path / "other", Decoder(config), other)
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "draft", "tokens"):
        await models.LoadModel(load("guessing", "tiny", draft_model=str(tmp_path / "other")))
    async with refused(grpc.StatusCode.NOT_FOUND, "'tinny'", "'tiny'"):
        await models.LoadModel(load("guessing", "tiny", draft_model="tinny"))
    assert [model.name for model in (await models.ListModels(wire.ListModelsRequest())).models] == ["tiny"]


async def test_states_that_had_to_leave_come_back_where_a_server_keeps_them(
    models: ModelServiceStub, stub: InferenceServiceStub
) -> None:
    small = {"kv_cache": "paged", "kv_cache_memory_bytes": 200_000, "max_num_seqs": 8}
    await models.LoadModel(load("kept", "tiny", kv_offload_bytes=10**8, **small))
    texts = [chr(ord("a") + place) * 40 for place in range(6)]
    alone = [await complete(stub, ask(text, max_new_tokens=60)) for text in texts]
    crowd = await asyncio.gather(*(complete(stub, ask(text, model="kept", max_new_tokens=60)) for text in texts))
    assert crowd == alone
    load_now = await stub.GetEngineStats(GetEngineStatsRequest(model="kept"))
    assert load_now.preemptions > 0
    assert load_now.reloaded_tokens > 0
    assert load_now.computed_tokens == sum(40 + 60 - 1 for _ in texts)
    assert load_now.offloaded_bytes == 0
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "kv_offload_bytes"):
        await models.LoadModel(load("minus", "tiny", kv_offload_bytes=-1))
