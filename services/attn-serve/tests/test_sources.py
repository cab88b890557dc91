"""Models that read a source, over gRPC: what they write, its scores and its pictures."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from asking_inference import complete, refused
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_core import installed
from attn_models.loading import load_model, save_model
from attn_models.tokenizers.learned import word_tokenizer
from attn_models.tokenizers.tokenizer import decoder_start_ids, encoder_input_ids
from attn_schema import EngineConfig

WORDS = "the a dog cat runs sees der die hund katze rennt sieht"
SOURCE = "the dog sees the cat"
SIZES = {"max_seq_len": 24, "max_encoder_len": 12, "hidden_size": 16, "embedding": 8}
MODELS = {"rnnsearch": SIZES | {"maxout": 8}, "bottleneck": SIZES}


@pytest.fixture
async def sourced(stub: InferenceServiceStub, inference, home: Path) -> InferenceServiceStub:
    for name, values in MODELS.items():
        tokenizer, family = word_tokenizer([WORDS]), installed().models.get(name)
        torch.manual_seed(4)
        model = family.build(family.configure(values | {"vocab_size": tokenizer.vocab_size}))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        save_model(home / "models" / f"tiny-{name}", model, tokenizer)
        await inference.served.load(f"tiny-{name}", "", EngineConfig(num_threads=1))
    return stub


def ask(source=SOURCE, model="tiny-rnnsearch", text=None, **sampling) -> inference_pb2.GenerateRequest:
    prompt = common_pb2.Prompt(encoder_prompt=common_pb2.EncoderPrompt(text=source))
    if text is not None:
        prompt.text = text
    sampling = {"temperature": 0.0, "max_new_tokens": 6} | sampling
    return inference_pb2.GenerateRequest(model=model, prompt=prompt, sampling=inference_pb2.SamplingParams(**sampling))


@pytest.mark.parametrize("name", MODELS)
async def test_a_translation_is_the_models_own_greedy_choice(sourced, home, name) -> None:
    loaded = load_model(home / "models" / f"tiny-{name}")
    source, tokens = encoder_input_ids(loaded.tokenizer, SOURCE), list(decoder_start_ids(loaded.tokenizer))
    for _ in range(6):
        logits = loaded.model(torch.tensor([tokens]), torch.tensor([source]))
        tokens.append(int(logits[0, -1].argmax()))
    found = await complete(sourced, ask(model=f"tiny-{name}", ignore_eos=True))
    assert found == tokens[1:]


async def test_the_beginning_of_the_answer_can_be_given(sourced) -> None:
    whole = [token async for message in sourced.Generate(ask(ignore_eos=True)) for token in message.tokens]
    rest = await complete(sourced, ask(text=whole[0].text, ignore_eos=True, max_new_tokens=5))
    assert rest == [token.id for token in whole[1:]]


async def test_scores_are_those_under_the_source(sourced) -> None:
    def prompt(source):
        return common_pb2.Prompt(text="der hund sieht", encoder_prompt=common_pb2.EncoderPrompt(text=source))

    request = inference_pb2.ScoreRequest(model="tiny-rnnsearch", prompts=[prompt(SOURCE), prompt("a cat runs")])
    one, other = (await sourced.Score(request)).scores
    assert len(one.tokens) == 4
    assert one.sum_logprob != other.sum_logprob


async def test_the_map_of_a_translation_has_its_words_down_and_the_source_across(sourced) -> None:
    request = ask(text="der hund", ignore_eos=True, max_new_tokens=1)
    (following,) = [token.text async for message in sourced.Generate(request) for token in message.tokens]
    prompt = common_pb2.Prompt(text="der hund", encoder_prompt=common_pb2.EncoderPrompt(text=SOURCE))
    request = inference_pb2.AttentionMapsRequest(model="tiny-rnnsearch", prompt=prompt)
    (found,) = [message async for message in sourced.AttentionMaps(request)]
    assert found.cross_attention
    assert [text.strip() for text in found.query_tokens] == ["der", "hund", following.strip()]
    assert [text.strip() for text in found.key_tokens] == [*SOURCE.split(), "</s>"]
    weights = np.frombuffer(found.attention_weights.data, "<f4").reshape(list(found.attention_weights.shape))
    assert weights.shape == (1, 3, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert found.mechanism == "alignment"
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "no attention"):
        [
            m
            async for m in sourced.AttentionMaps(
                inference_pb2.AttentionMapsRequest(model="tiny-bottleneck", prompt=prompt)
            )
        ]


async def test_a_source_that_does_not_fit_the_model_is_named(sourced) -> None:
    bad = grpc.StatusCode.INVALID_ARGUMENT
    async with refused(bad, "prompt.encoder_prompt", "no encoder"):
        await complete(sourced, ask(model="tiny", text="To be"))
    async with refused(bad, "encoder_token_ids", "at least one token"):
        plain = inference_pb2.GenerateRequest(model="tiny-rnnsearch", prompt=common_pb2.Prompt(text="der"))
        await complete(sourced, plain)
    async with refused(bad, "'21 tokens'", "at most 12"):
        await complete(sourced, ask(source="the " * 20))
    for empty in ("", "   "):
        async with refused(bad, "source", "at least one token"):
            await complete(sourced, ask(source=empty))
    async with refused(bad, "encoder_token_ids[1]", "0 to 15"):
        ids = common_pb2.EncoderPrompt(token_ids=common_pb2.TokenIds(ids=[1, 99]))
        request = inference_pb2.GenerateRequest(model="tiny-rnnsearch", prompt=common_pb2.Prompt(encoder_prompt=ids))
        await complete(sourced, request)
    async with refused(bad, "encoder_prompt", "text or token_ids"):
        request = inference_pb2.GenerateRequest(
            model="tiny-rnnsearch", prompt=common_pb2.Prompt(encoder_prompt=common_pb2.EncoderPrompt())
        )
        await complete(sourced, request)
    async with refused(bad, "prompt.encoder_prompt"):
        maps = inference_pb2.AttentionMapsRequest(model="tiny-rnnsearch", prompt=common_pb2.Prompt(text="der"))
        [message async for message in sourced.AttentionMaps(maps)]
