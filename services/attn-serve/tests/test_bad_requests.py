"""What cannot be done is refused by name, and nothing is lost by it."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from asking_inference import ask, complete, drained, refused
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub

NAN = float("nan")
NESTED = '{"type":"object","properties":{"a":' * 400 + "{}" + "}}" * 400
PARTS = [
    {"anyOf": [{"type": "object", "properties": {f"k{i}{j}": {"type": "integer"}}} for j in range(8)]}
    for i in range(12)
]
EXPLODING = json.dumps({"allOf": PARTS})
LONG = json.dumps({"enum": [f"v{number}" * 50 for number in range(5000)]})
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": NAN}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"min_p": NAN}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": NAN}, "repetition_penalty"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [f"stop {number}" for number in range(5000)]}, "5000 items"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": NAN}, "presence_penalty"),
    ({"logit_bias": {0: 101.0}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": {99999: 1.0}}, "logit_bias"),
    ({"min_new_tokens": 10, "max_new_tokens": 5}, "min_new_tokens"),
    ({"structured_output": inference_pb2.StructuredOutput()}, "structured_output"),
    ({"structured_output": inference_pb2.StructuredOutput(regex="(")}, "structured_output"),
    ({"structured_output": inference_pb2.StructuredOutput(json_schema="{")}, "structured_output"),
    ({"structured_output": inference_pb2.StructuredOutput(regex="a"), "ignore_eos": True}, "ignore_eos"),
    ({"structured_output": inference_pb2.StructuredOutput(json_schema=NESTED)}, "recursion"),
    ({"structured_output": inference_pb2.StructuredOutput(json_schema=EXPLODING)}, "too large"),
    ({"structured_output": inference_pb2.StructuredOutput(json_schema=LONG)}, "262144 characters"),
    ({"structured_output": inference_pb2.StructuredOutput(regex="(" * 5000 + "a" + ")" * 5000)}, "structured_output"),
]


@pytest.mark.parametrize(
    ("sampling", "field"), BAD_SAMPLING, ids=[f"{str(case)[:60]} {field}" for case, field in BAD_SAMPLING]
)
async def test_a_bad_sampling_parameter_is_refused_by_name(
    stub: InferenceServiceStub, sampling: dict[str, Any], field: str
) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, field):
        await complete(stub, ask(**({"max_new_tokens": 4} | sampling)))
    assert (await drained(stub)).running == 0


async def test_a_prompt_beyond_the_context_is_refused_with_the_three_numbers(stub: InferenceServiceStub) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "250", "20", "256"):
        await complete(stub, ask("a" * 250, max_new_tokens=20))


async def test_an_unknown_model_is_answered_with_the_nearest_one(stub: InferenceServiceStub) -> None:
    async with refused(grpc.StatusCode.NOT_FOUND, "'tinny'", "'tiny'"):
        await complete(stub, ask(model="tinny"))


@pytest.mark.parametrize(
    "prompt",
    [common_pb2.Prompt(), common_pb2.Prompt(text=""), common_pb2.Prompt(token_ids=common_pb2.TokenIds())],
    ids=["none", "empty text", "no tokens"],
)
async def test_an_empty_prompt_is_refused(stub: InferenceServiceStub, prompt: common_pb2.Prompt) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "prompt"):
        await complete(stub, inference_pb2.GenerateRequest(model="tiny", prompt=prompt))


@pytest.mark.parametrize("token", [-1, 10**6, 2**31 - 1])
async def test_a_token_outside_the_vocabulary_is_refused_with_its_place(stub: InferenceServiceStub, token: int) -> None:
    prompt = common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=[1, 2, token]))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "[2]", str(token)):
        await complete(stub, inference_pb2.GenerateRequest(model="tiny", prompt=prompt))


async def test_a_character_the_model_cannot_spell_is_refused(stub: InferenceServiceStub) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await complete(stub, ask("naïve"))


async def test_a_conversation_with_a_model_without_template_is_refused(stub: InferenceServiceStub) -> None:
    chat = common_pb2.Chat(messages=[common_pb2.ChatMessage(role="user", content="hello")])
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "chat template"):
        await complete(stub, inference_pb2.GenerateRequest(model="tiny", prompt=common_pb2.Prompt(chat=chat)))


async def test_scoring_nothing_is_refused(stub: InferenceServiceStub) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "prompts"):
        await stub.Score(inference_pb2.ScoreRequest(model="tiny"))


async def test_one_bad_sequence_among_good_ones_is_refused_and_nothing_stays_behind(stub: InferenceServiceStub) -> None:
    prompts = [common_pb2.Prompt(text="fine"), common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=[999]))]
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "999"):
        await stub.Score(inference_pb2.ScoreRequest(model="tiny", prompts=prompts))
    assert (await drained(stub)).kv_tokens_used == 0


async def test_refusals_do_not_disturb_a_completion_that_runs(stub: InferenceServiceStub) -> None:
    import asyncio

    alone = await complete(stub, ask(max_new_tokens=60))
    running = asyncio.create_task(complete(stub, ask(max_new_tokens=60)))
    for sampling, field in BAD_SAMPLING[:6]:
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, field):
            await complete(stub, ask(**({"max_new_tokens": 4} | sampling)))
    assert await running == alone
