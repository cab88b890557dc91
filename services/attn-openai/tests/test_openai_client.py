"""OpenAI's own client reads every answer, and what it reads agrees with what the engine computes over gRPC."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_gateway import Gateway
from attn_schema import EngineConfig

openai = pytest.importorskip("openai")

ASKED = [{"role": "user", "content": "to be?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


async def over_grpc(gateway: Gateway, **sampling: Any) -> tuple[str, list[float]]:
    """Text and log probabilities of the same conversation over gRPC."""
    chat = common_pb2.Chat(messages=[common_pb2.ChatMessage(**message) for message in ASKED])
    request = inference_pb2.GenerateRequest(
        model="tiny", prompt=common_pb2.Prompt(chat=chat), sampling=inference_pb2.SamplingParams(**sampling)
    )
    text, logprobs = "", []
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        async for answer in InferenceServiceStub(channel).Generate(request):
            text += answer.text
            logprobs += [token.logprob for token in answer.tokens]
    return text, logprobs


async def test_a_chat_completion_has_text_and_log_probabilities_of_the_same_call_over_grpc(
    client: Any, gateway: Gateway
) -> None:
    given = {"model": "tiny", "messages": ASKED, "max_completion_tokens": 12, "seed": 5, "temperature": 0.7}
    answer = await client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    text, logprobs = await over_grpc(gateway, max_new_tokens=12, seed=5, temperature=0.7, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == text
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(logprobs)
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert choice.finish_reason == "length"


async def test_a_stream_joined_is_the_answer_and_ends_with_the_usage(client: Any) -> None:
    given = {"model": "tiny", "messages": ASKED, "max_completion_tokens": 9, "seed": 1, "n": 3}
    whole = await client.chat.completions.create(**given)
    texts, ended, usage = ["", "", ""], {}, None
    async for chunk in await client.chat.completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ended[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ended == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len(set(texts)) == 3
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_context(client: Any) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=ASKED, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (WEATHER, "tool_calls")])
async def test_a_forced_call_is_a_call_of_that_function_with_arguments_of_its_schema(
    client: Any, choice: Any, reason: str
) -> None:
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": "weather"}}
    given = {"model": "tiny", "messages": ASKED, "tools": [WEATHER], "tool_choice": choice, "seed": 3}
    given |= {"parallel_tool_calls": False, "max_completion_tokens": 300}
    answer = await client.chat.completions.create(**given)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in {"Rome", "Oslo"}
    assert answer.choices[0].finish_reason == reason
    arguments, name, reasons = "", "", []
    async for chunk in await client.chat.completions.create(**given, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            name, arguments = name + (delta.function.name or ""), arguments + delta.function.arguments
        reasons.append(chunk.choices[0].finish_reason)
    assert (name, arguments, reasons[-1]) == ("weather", call.function.arguments, reason)


async def test_a_conversation_goes_on_after_a_call(client: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = await client.chat.completions.create(
        model="tiny", messages=messages, tools=[WEATHER], max_completion_tokens=5, seed=1
    )
    assert answer.choices[0].finish_reason == "length"


async def test_a_response_format_is_kept(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    answer = await client.chat.completions.create(
        model="tiny", messages=ASKED, response_format=wanted, max_completion_tokens=400, seed=2
    )
    assert json.loads(answer.choices[0].message.content)["a"] in {1, 2}
    text = await client.chat.completions.create(
        model="tiny", messages=ASKED, extra_body={"structured_outputs": {"choice": ["yes", "n(o)"]}}
    )
    assert text.choices[0].message.content in {"yes", "n(o)"}


async def test_completions_of_many_prompts_are_those_of_each(client: Any) -> None:
    given = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    alone = [(await client.completions.create(prompt=text, **given)).choices[0].text for text in ("to", "be", "or")]
    together = await client.completions.create(prompt=["to", "be", "or"], **given)
    assert [choice.text for choice in together.choices] == alone
    streamed = ["", "", ""]
    async for chunk in await client.completions.create(prompt=["to", "be", "or"], stream=True, **given):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone


async def test_token_ids_are_the_prompt_that_they_spell(client: Any, http: Any) -> None:
    read = (await http.post("/tokenize", json={"model": "tiny", "prompt": "to be"})).json()
    given = {"model": "tiny", "max_tokens": 6, "temperature": 0, "echo": True}
    by_text = await client.completions.create(prompt="to be", **given)
    by_ids = await client.completions.create(prompt=read["tokens"], **given)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_text.choices[0].text.startswith("to be")


async def test_echoed_log_probabilities_are_those_of_generating_the_same_tokens(client: Any) -> None:
    given = {"model": "tiny", "temperature": 0, "logprobs": 1}
    made = (await client.completions.create(prompt="to be", max_tokens=5, **given)).choices[0]
    scored = await client.completions.create(prompt="to be" + made.text, max_tokens=0, echo=True, **given)
    (choice,) = scored.choices
    assert choice.logprobs.token_logprobs[0] is None
    assert scored.usage.completion_tokens == 0
    assert choice.text == "to be" + made.text
    if choice.logprobs.tokens[-5:] == made.logprobs.tokens:
        assert choice.logprobs.token_logprobs[-5:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-4)


async def test_embeddings_are_equal_in_both_encodings_and_of_length_one_when_cut(client: Any) -> None:
    plain = await client.embeddings.create(model="tiny-bert", input=["ab", "cd"], encoding_format="float")
    coded = await client.embeddings.create(model="tiny-bert", input=["ab", "cd"])  # the client asks for base64
    for one, other in zip(plain.data, coded.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
    short = (await client.embeddings.create(model="tiny-bert", input="ab", dimensions=3)).data[0].embedding
    assert sum(value * value for value in short) == pytest.approx(1)
    assert short[0] / short[1] == pytest.approx(plain.data[0].embedding[0] / plain.data[0].embedding[1], rel=1e-5)


async def test_a_response_is_the_chat_completion_of_the_same_words(client: Any) -> None:
    chat = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be."}, *ASKED],
        max_completion_tokens=8,
        seed=1,
    )
    given = {"model": "tiny", "instructions": "Be.", "input": "to be?", "max_output_tokens": 8}
    response = await client.responses.create(**given, extra_body={"seed": 1})
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    text, kinds = "", []
    async for event in await client.responses.create(**given, stream=True, extra_body={"seed": 1}):
        kinds.append(event.type)
        assert event.sequence_number == len(kinds) - 1
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == response.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")


async def test_a_response_calls_a_function(client: Any) -> None:
    tool = {"type": "function", **WEATHER["function"]}
    given = {
        "model": "tiny",
        "input": "to be?",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    response = await client.responses.create(**given, max_output_tokens=300, extra_body={"seed": 1})
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["city"] in {"Rome", "Oslo"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = await client.responses.create(
        model="tiny", input=[{"role": "user", "content": "to be?"}, call.model_dump(), output], max_output_tokens=4
    )
    assert after.usage.output_tokens == 4


async def test_models_are_listed_and_found(client: Any) -> None:
    listed = [model.id async for model in client.models.list()]
    assert listed == ["tiny", "tiny-bert"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("tinny")


async def test_errors_are_the_classes_that_the_client_knows(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="tinny", messages=ASKED)
    assert unknown.value.code == "model_not_found"
    assert "did you mean 'tiny'" in str(unknown.value)
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as field:
        await client.chat.completions.create(model="tiny", messages=ASKED, extra_body={"min_tokens": -1})
    assert field.value.param == "min_tokens"


async def test_what_a_request_leaves_out_is_as_the_model_recommends_and_else_openais(
    client: Any, inference: Any, home: Path, tmp_path: Path
) -> None:
    advised = shutil.copytree(home / "models" / "tiny", tmp_path / "advised")
    (advised / "manifest.json").unlink()  # it would not list the file
    (advised / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.4, "top_p": 0.8}')
    await inference.served.load("advised", str(advised), EngineConfig(num_threads=1))

    async def texts(model: str, **given: Any) -> tuple[str, str]:
        asked = {"model": model, "seed": 5, **given}
        chat = await client.chat.completions.create(messages=ASKED, max_completion_tokens=12, **asked)
        plain = await client.completions.create(prompt="to be", max_tokens=12, **asked)
        return chat.choices[0].message.content, plain.choices[0].text

    advice = {"temperature": 0.4, "top_p": 0.8}
    assert await texts("advised") == await texts("tiny", **advice)
    assert await texts("advised", temperature=2, top_p=1) == await texts("tiny", temperature=2) != await texts("tiny")
    assert await texts("tiny") == await texts("tiny", temperature=1)
    answer = await client.responses.create(model="advised", input="to be?", max_output_tokens=4)
    assert (answer.temperature, answer.top_p) == (0.4, 0.8)
