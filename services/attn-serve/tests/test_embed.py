"""Texts to vectors over gRPC, and how an encoder shares its time."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from asking_inference import ask, begun, complete, drained, refused
from attn.v1 import common_pb2, model_pb2
from attn.v1 import inference_pb2 as wire
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2 import GetModelRequest, LoadModelRequest, UnloadModelRequest
from attn.v1.model_pb2_grpc import ModelServiceStub
from attn_core.errors import DeadlineExceeded, Unavailable
from attn_engine.client import EmbedTask
from attn_engine.host.encoder import Embedding, EncoderHost
from attn_models.loading.sentences import BATCH, load_sentence_encoder
from attn_schema import Embeddings, EngineConfig

NAME = "tiny-bert"
TEXTS = ["abc", "d", "bad cab", "abc"]


def texts(*given: str, model: str = NAME) -> wire.EmbedRequest:
    return wire.EmbedRequest(model=model, texts=given)


def wanted(*given: str, timeout: float | None = None) -> EmbedTask:
    return EmbedTask(texts=given, timeout=timeout)


def rows(answer: wire.EmbedResponse) -> np.ndarray[Any, Any]:
    return np.frombuffer(answer.embeddings.data, "<f4").reshape(list(answer.embeddings.shape))


@pytest.fixture
async def encoder(stub: InferenceServiceStub, models: ModelServiceStub) -> InferenceServiceStub:
    await models.LoadModel(LoadModelRequest(name=NAME))
    return stub


@pytest.fixture
def host(home: Path) -> EncoderHost:
    return EncoderHost(home / "models" / NAME, EngineConfig(num_threads=1))


async def test_texts_become_the_vectors_of_the_encoder_in_their_order(
    encoder: InferenceServiceStub, home: Path
) -> None:
    answer = await encoder.Embed(texts(*TEXTS))
    found = rows(answer)
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(found, load_sentence_encoder(home / "models" / NAME).embed(TEXTS).numpy())
    tokens = [await encoder.Tokenize(wire.TokenizeRequest(model=NAME, prompt=common_pb2.Prompt(text=t))) for t in TEXTS]
    assert answer.usage.prompt_tokens == sum(len(each.tokens) for each in tokens)
    load = await encoder.GetEngineStats(wire.GetEngineStatsRequest(model=NAME))
    assert (load.running, load.computed_tokens) == (0, answer.usage.prompt_tokens)


async def test_the_maps_of_an_encoder_are_those_of_its_layers(encoder: InferenceServiceStub, home: Path) -> None:
    request = wire.AttentionMapsRequest(model=NAME, prompt=common_pb2.Prompt(text="bad cab"), heads=[1])
    (found,) = [one async for one in encoder.AttentionMaps(request)]
    own = load_sentence_encoder(home / "models" / NAME)
    (ids,) = own.read(["bad cab"])
    with torch.no_grad():
        layer = own.model.attention_maps(torch.tensor(ids), [0])[0][1:2]
    weights = np.frombuffer(found.attention_weights.data, "<f4").reshape(list(found.attention_weights.shape))
    np.testing.assert_array_equal(weights, layer.numpy())
    assert (len(found.query_tokens), found.cross_attention) == (len(ids), False)


async def test_the_most_texts_of_one_request_come_back_whole(encoder: InferenceServiceStub) -> None:
    answer = await encoder.Embed(texts(*("abcd"[n % 4] * (1 + n % 12) for n in range(1024))))
    found = rows(answer)
    assert found.shape == (1024, 8)
    np.testing.assert_allclose(found[12:24], found[24:36], atol=1e-6)


BAD: list[tuple[wire.EmbedRequest, grpc.StatusCode, tuple[str, ...]]] = [
    (texts("a", model="tiny-brt"), grpc.StatusCode.NOT_FOUND, ("'tiny-brt'", "'tiny-bert'")),
    (texts("a", model="tiny"), grpc.StatusCode.INVALID_ARGUMENT, ("not an encoder",)),
    (texts(), grpc.StatusCode.INVALID_ARGUMENT, ("texts", "1 to 1024 texts")),
    (texts(*["a"] * 1025), grpc.StatusCode.INVALID_ARGUMENT, ("1025 items", "1024")),
    (texts("a", "a" * 13), grpc.StatusCode.INVALID_ARGUMENT, ("texts[1]", "13 tokens", "1 to 12")),
    (texts("a", ""), grpc.StatusCode.INVALID_ARGUMENT, ("texts[1]", "0 tokens")),
    (texts("a", "xyz"), grpc.StatusCode.INVALID_ARGUMENT, ("x",)),
]


@pytest.mark.parametrize(("request_", "code", "words"), BAD, ids=[" ".join(words) for *_, words in BAD])
async def test_what_cannot_be_embedded_is_refused_by_name(
    encoder: InferenceServiceStub, request_: wire.EmbedRequest, code: grpc.StatusCode, words: tuple[str, ...]
) -> None:
    async with refused(code, *words):
        await encoder.Embed(request_)
    assert rows(await encoder.Embed(texts("a"))).shape == (1, 8)


async def test_an_encoder_refuses_what_only_a_writer_can_do(
    encoder: InferenceServiceStub, models: ModelServiceStub
) -> None:
    model = (await models.GetModel(GetModelRequest(name=NAME))).model
    assert (model.architecture, model.max_seq_len, model.num_layers, model.chat) == ("encoder", 12, 1, False)
    prompt = common_pb2.Prompt(text="abc")
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "encoder"):
        await complete(encoder, ask("abc", model=NAME))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "encoder"):
        await encoder.Score(wire.ScoreRequest(model=NAME, prompts=[prompt]))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [("quantization", "int3", "int8"), ("draft_model", "tiny", "encoder"), ("device", "tpu", "auto, cpu, cuda")],
)
async def test_an_encoder_refuses_settings_that_it_cannot_keep(
    models: ModelServiceStub, field: str, value: str, says: str
) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, field, says):
        await models.LoadModel(LoadModelRequest(name=NAME, engine=model_pb2.EngineConfig(**{field: value})))


async def test_an_unloaded_encoder_is_gone(encoder: InferenceServiceStub, models: ModelServiceStub) -> None:
    await models.UnloadModel(UnloadModelRequest(name=NAME))
    async with refused(grpc.StatusCode.NOT_FOUND, NAME):
        await encoder.Embed(texts("a"))


def test_vectors_of_sixteen_bit_weights_have_length_one_too(home: Path) -> None:
    host = EncoderHost(home / "models" / NAME, EngineConfig(num_threads=1, dtype="bfloat16"))
    answer = host.embed(wanted(*TEXTS)).result()
    found = torch.from_numpy(np.array(answer.rows(), "<f4"))
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(len(TEXTS)), rtol=0, atol=1e-6)


def test_an_encoder_is_served_with_the_weights_that_are_asked_for(home: Path, host: EncoderHost) -> None:
    packed = EncoderHost(home / "models" / NAME, EngineConfig(num_threads=1, quantization="int8"))
    assert (packed.info.quantization, host.info.quantization) == ("int8", "none")
    assert packed.info.num_parameters == host.info.num_parameters
    near, exact = (np.array(each.embed(wanted(*TEXTS)).result().rows()) for each in (packed, host))
    assert 0 < np.abs(near - exact).max() < 0.05


def started(host: EncoderHost, call: Future[Embeddings]) -> None:
    """Return once something was computed, and not all."""
    while host.stats().computed_tokens == 0:
        assert not call.done()
        time.sleep(0.001)


def test_a_deadline_that_has_passed_ends_the_work(host: EncoderHost) -> None:
    with pytest.raises(DeadlineExceeded):
        host.embed(wanted(*["a"] * 1000, timeout=0)).result()
    assert host.stats().running == 0
    assert host.embed(wanted("a", timeout=60)).result().embeddings.shape == (1, 8)


def test_a_short_call_does_not_wait_for_a_long_one_and_stopping_ends_both(host: EncoderHost) -> None:
    running = host.embed(wanted(*["abcd abcd"] * 20_000))
    started(host, running)
    assert host.embed(wanted("a")).result().embeddings.shape == (1, 8)
    assert not running.done()
    host.stop(0)
    with pytest.raises(Unavailable):
        running.result(timeout=60)
    with pytest.raises(Unavailable):
        host.embed(wanted("a"))


def test_a_cancelled_call_computes_one_batch_more_at_most(host: EncoderHost) -> None:
    long = wanted(*["abcd abcd"] * 20_000)
    running = host.embed(long)
    started(host, running)
    host.cancel(long.id)
    host.cancel("never begun")
    computed, load = host.stats().computed_tokens, host.stats()
    assert (load.running, load.waiting) == (0, 0)
    with pytest.raises(CancelledError):
        running.result()
    assert host.embed(wanted("a")).result().embeddings.shape == (1, 8)  # whatever was left would have had its turn
    assert host.stats().computed_tokens <= computed + BATCH * len("abcd abcd") + 1


def test_a_cancelled_call_that_waits_for_its_turn_holds_no_vectors(home: Path) -> None:
    encoder = load_sentence_encoder(home / "models" / NAME)
    many = 3 * BATCH + 1

    def held() -> int:
        return sum(type(found) is torch.Tensor and found.shape == (many, 8) for found in gc.get_objects())

    waiting = Embedding(encoder, wanted(*["abc"] * many))
    assert waiting.step() > 0
    assert held() == 1
    waiting.answer.cancel()
    assert held() == 0
    assert waiting.step() == 0


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "deadline"])
async def test_callers_who_go_away_are_computed_no_further(encoder: InferenceServiceStub, cancelled: bool) -> None:
    calls = [encoder.Embed(texts(*["abcd abcd"] * 1024), timeout=None if cancelled else 0.05) for _ in range(100)]
    await begun(encoder, NAME)
    for call in calls if cancelled else []:
        call.cancel()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(end, BaseException) for end in ends)
    found = await drained(encoder, NAME)
    assert (found.running, found.waiting) == (0, 0)
    assert found.computed_tokens < 100 * 1024 * len("abcd abcd") / 2
