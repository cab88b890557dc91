"""What clients send: fields of messages and requests that mean nothing here, schemas as their libraries write them,
conversations with calls and thoughts, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
import string
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tokenizers
import torch
from attn_gateway import GatewaySettings
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_schema import EngineConfig
from attn_schema.decoder import DecoderConfig

ASKED = [{"role": "user", "content": "to be?"}]
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}}
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n'
    "{{ m.mood }}{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking != false %}<think>\n"
    "{% endif %}{% endif %}"
)


@pytest.fixture
async def thinker(home: Path, inference: Any, url: str) -> str:
    """A random model whose template has tools and thoughts, and whose marks are single tokens, two of them special."""
    folder = home / "models" / "thinker"
    if not folder.exists():
        torch.manual_seed(2)
        plain = byte_pair_tokenizer(["to be or not to be, that is the question"], 280)
        backend = plain.backend
        backend.add_tokens([tokenizers.AddedToken(mark, special=False) for mark in MARKS[:2]])
        backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in MARKS[2:]])
        tokenizer = Tokenizer(backend, dataclasses.replace(plain.settings, chat_template=TEMPLATE))
        config = DecoderConfig(
            vocab_size=tokenizer.vocab_size,
            max_seq_len=2048,
            hidden_size=32,
            num_layers=1,
            num_heads=4,
            mechanism="mha",
        )
        save_model(folder, Decoder(config), tokenizer)
    await inference.served.load("thinker", "", EngineConfig(num_threads=1))
    return "thinker"


async def chat(http: httpx2.AsyncClient, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", "messages": ASKED, "max_completion_tokens": 2, **fields}
    return await http.post("/v1/chat/completions", json=body)


async def test_parallel_calls_after_a_thought_can_be_sent_back_with_their_results(
    http: httpx2.AsyncClient, thinker: str
) -> None:
    given = {"model": thinker, "tools": [WEATHER], "tool_choice": "required", "max_completion_tokens": 600}
    bias = {"logit_bias": {"283": 5}}  # towards the end of thoughts
    for seed in range(20):
        answer = (await chat(http, **given, **bias, seed=seed)).json()
        message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
        if len(message.get("tool_calls", [])) > 1 and reason == "tool_calls" and "reasoning_content" in message:
            break
    assert reason == "tool_calls"
    assert message["reasoning_content"].strip()
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert all(json.loads(call["function"]["arguments"])["city"] in {"Rome", "Oslo"} for call in message["tool_calls"])
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "1.10"} for call in reversed(message["tool_calls"])
    ]
    after = await chat(http, model=thinker, messages=[*ASKED, message, *results], tools=[WEATHER])
    assert after.status_code == 200, after.text
    tokens = (await http.post("/tokenize", json={"model": thinker, "messages": [*ASKED, message, *results]})).json()
    text = (await http.post("/detokenize", json={"model": thinker, "tokens": tokens["tokens"]})).json()["prompt"]
    assert text.count("<tool_call>") == len(message["tool_calls"])
    assert text.count("1.10") == len(results)


async def test_a_stream_of_thoughts_and_calls_joined_is_the_whole_answer(
    http: httpx2.AsyncClient, thinker: str
) -> None:
    given = {"model": thinker, "tools": [WEATHER], "tool_choice": "required", "max_completion_tokens": 300, "seed": 4}
    whole = (await chat(http, **given)).json()["choices"][0]["message"]
    lines = (await chat(http, **given, stream=True)).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole.get("reasoning_content", "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    joined = "".join(call["function"]["arguments"] for call in calls)
    assert joined == "".join(call["function"]["arguments"] for call in whole.get("tool_calls", []))


async def test_values_of_a_template_reach_it_and_a_mark_that_is_said_is_text(
    http: httpx2.AsyncClient, thinker: str
) -> None:
    async def length(**fields: Any) -> int:
        answer = await chat(http, model=thinker, **fields)
        assert answer.status_code == 200, answer.text
        tokens: int = answer.json()["usage"]["prompt_tokens"]
        return tokens

    plain = await length()
    assert await length(documents=[{"text": "a document"}]) > plain
    assert await length(messages=[ASKED[0] | {"mood": "glad"}]) > plain
    for off in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert await length(**off) < plain
    assert await length(messages=[*ASKED, {"role": "assistant", "content": "that"}], continue_final_message=True)
    said = {"role": "user", "content": "<tool_call></think>"}
    read = (await http.post("/tokenize", json={"model": thinker, "messages": [said]})).json()["tokens"]
    empty = (await http.post("/tokenize", json={"model": thinker, "messages": [said | {"content": ""}]})).json()[
        "tokens"
    ]
    assert {i for i in read if i >= 280} == {i for i in empty if i >= 280}


async def test_an_answer_of_a_schema_may_follow_a_thought_or_stand_beside_tools(
    http: httpx2.AsyncClient, thinker: str
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": CITY, "strict": True}}
    given = {"model": thinker, "response_format": wanted, "max_completion_tokens": 600, "logit_bias": {"283": 6}}
    found = 0
    for seed, tools in enumerate(([], [WEATHER], [WEATHER])):
        choice = (await chat(http, **given, tools=tools, seed=seed)).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["city"] in {"Rome", "Oslo"}
            found += 1
    assert found


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}


@pytest.mark.parametrize(
    "changes",
    [
        {"annotations": [], "audio": None, "function_call": None, "refusal": None, "parsed": {"a": 1}, "id": "x"},
        {"tool_calls": [CALL | {"index": 0, "function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
        {"tool_calls": [CALL | {"function": {"name": "weather", "arguments": "", "parsed_arguments": {}}}]},
        {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"content": "x", "reasoning_content": "y", "provider_specific_fields": {"z": 1}},
        {"content": "", "name": None},
    ],
)
async def test_history_as_clients_send_it_is_taken(http: httpx2.AsyncClient, changes: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL], **changes}
    developer = {"role": "developer", "content": "Be short."}
    answer = await chat(http, messages=[developer, *ASKED, message, RESULT], tools=[WEATHER], max_completion_tokens=1)
    assert answer.status_code == 200, answer.text


async def test_a_value_that_asks_for_the_default_is_never_refused(http: httpx2.AsyncClient) -> None:
    defaults = {
        "n": 1, "stream_options": None, "logprobs": False, "top_logprobs": 0, "tool_choice": "auto", "store": False,
        "parallel_tool_calls": True, "logit_bias": {}, "modalities": ["text"], "best_of": 1, "functions": None,
        "verbosity": "medium", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "stop": [],
        "chat_template_kwargs": {}, "skip_special_tokens": True, "web_search_options": None,
        "response_format": {"type": "text"},
    }  # fmt: skip
    assert (await chat(http, **defaults)).status_code == 200
    usage = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    lines = (await chat(http, stream=True, stream_options=usage)).text.splitlines()
    counts = [json.loads(line[6:])["usage"] for line in lines if line.startswith("data: {")]
    assert counts[-1]["completion_tokens"] == max(count["completion_tokens"] for count in counts) == 2
    assert {count["prompt_tokens"] for count in counts} == {counts[-1]["prompt_tokens"]}


PART = {"type": "text", "text": "x", "wat": 1}
CUT = CALL | {"function": {"name": "f", "arguments": '{"a'}}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": [ASKED[0] | {"content": [PART]}]}, "messages[0].content[0].wat"),
        ({"messages": [ASKED[0] | {"wat": 1}]}, "messages[0].wat"),
        ({"tools": [WEATHER | {"wat": 1}]}, "tools[0].wat"),
        ({"tools": [{"type": "function", "function": {"name": "f", "wat": 1}}]}, "tools[0].function.wat"),
        ({"tools": [WEATHER] * 10_000}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": "x" * 2**20}}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters.type"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [CALL, CALL]}]}, "messages[1].tool_calls[1].id"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [CUT]}]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [*ASKED, RESULT]}, "messages[1].tool_call_id"),
        ({"documents": [{"text": "never shown"}]}, "documents"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": {"title": "x" * 2**20}}}},
         "response_format"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_at_once_in_the_words_of_the_field(
    http: httpx2.AsyncClient, changes: dict[str, Any], param: str | None
) -> None:
    await chat(http)  # the template is known from now on
    spent, reading = [], []
    for _ in range(3):
        start = time.process_time()  # of client and server, however busy the machine is
        answer = await chat(http, **changes)
        spent.append(time.process_time() - start)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        start = time.process_time()
        json.loads(json.dumps(changes))
        reading.append(time.process_time() - start)
    assert min(spent) < 0.1 + min(reading)  # two megabytes alone take as long on a slow chip


UNSUPPORTED = {
    "sets": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "records": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    "zod's e-mail": {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)[a-z]+@[a-z]+\.[a-z]{2,}$"},
    "zod's cuid": {"type": "string", "format": "cuid", "pattern": "^[cC][^\\s-]{8,}$"},
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "bytes": {"type": "string", "format": "binary"},
    "unions": {
        "discriminator": {"propertyName": "k"},
        "oneOf": [{"type": "object", "properties": {"k": {"const": name}}} for name in "ab"],
    },
    "negations": {"not": {"type": "string"}},
}  # fmt: skip
SUPPORTED = {"records", "zod's cuid", "int64", "float32", "bytes", "unions"}
"""Those whose meaning can be constrained exactly, so that they are taken with `strict`, too."""


@pytest.mark.parametrize("kind", UNSUPPORTED)
async def test_a_keyword_that_cannot_be_constrained_refuses_only_what_is_strict(
    http: httpx2.AsyncClient, kind: str
) -> None:
    parameters = {"type": "object", "properties": {"x": UNSUPPORTED[kind]}}
    function = {"name": "f", "parameters": parameters}
    lax = await chat(http, tools=[WEATHER, {"type": "function", "function": function}])
    assert lax.status_code == 200, lax.text
    strict = await chat(http, tools=[{"type": "function", "function": function | {"strict": True}}])
    assert strict.status_code == (200 if kind in SUPPORTED else 400), strict.text
    if kind not in SUPPORTED:
        error = strict.json()["error"]
        assert error["param"] == "tools[0].function.parameters"
        assert "start:" not in error["message"]


async def test_arguments_are_an_object_whether_or_not_the_schema_says_so(http: httpx2.AsyncClient) -> None:
    parameters = {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    given = {"tools": [tool], "tool_choice": "required", "max_completion_tokens": 300, "parallel_tool_calls": False}
    for seed in range(4):
        choice = (await chat(http, **given, seed=seed)).json()["choices"][0]
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["a"] in {True, False}


@pytest.mark.parametrize("settings", [GatewaySettings(port=0, http_port=0, token="one", other_tokens=("two",))])
async def test_a_response_goes_on_by_id_for_its_caller_alone(
    http: httpx2.AsyncClient, settings: GatewaySettings
) -> None:
    def asked(token: str, **fields: Any) -> Any:
        body = {"model": "tiny", "input": "to be?", "max_output_tokens": 3, **fields}
        return http.post("/v1/responses", json=body, headers={"authorization": f"bearer {token}"})

    first = (await asked("one", metadata={"a": "b"})).json()
    assert first["metadata"] == {"a": "b"}
    next_ = {"previous_response_id": first["id"]}
    second = (await asked("one", **next_)).json()
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert (await asked("two", **next_)).status_code == 400
    unkept = (await asked("one", store=False)).json()
    assert (await asked("one", previous_response_id=unkept["id"])).status_code == 400


async def test_a_failed_stream_of_a_response_is_an_exception_of_the_client(client: Any) -> None:
    openai = pytest.importorskip("openai")
    await client.responses.create(model="tiny", input="to be?", max_output_tokens=1)  # the template is known
    events = await client.responses.create(
        model="tiny",
        input="to be?",
        stream=True,
        extra_body={"timeout": 0.3, "ignore_eos": True, "max_output_tokens": 900},
    )
    with pytest.raises(openai.APIError, match="deadline"):
        [event async for event in events]


async def test_clients_are_told_what_not_to_repeat(http: httpx2.AsyncClient) -> None:
    late = await chat(http, timeout=0.05, ignore_eos=True, max_completion_tokens=900)
    assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")
    long = await chat(http, max_completion_tokens=5000)
    assert "maximum context length is 1024 tokens" in long.json()["error"]["message"]


async def test_a_wrong_path_names_the_paths_of_this_interface(http: httpx2.AsyncClient) -> None:
    for method in ("GET", "POST"):
        answer = await http.request(method, "/v1/chats", json={})
        assert answer.status_code == 404
        assert "/v1/chat/completions" in answer.text
        assert "attn.v1" not in answer.text
    assert (await http.get("/v1/chat/completions")).headers["allow"] == "POST"


async def test_a_message_of_anthropics_format_is_the_chat_completion_of_the_same_words(
    http: httpx2.AsyncClient,
) -> None:
    body = {
        "model": "tiny", "max_tokens": 600, "temperature": 0, "metadata": {"user_id": "x"}, "messages": ASKED,
        "system": [{"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "weather", "description": "d", "input_schema": CITY}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "thinking": {"type": "disabled"},
    }  # fmt: skip
    whole = (await http.post("/v1/messages", json=body)).json()
    given = {"model": "tiny", "messages": [{"role": "system", "content": "Be."}, *ASKED], "temperature": 0}
    given |= {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "enable_thinking": False}
    expected = (await chat(http, **given, max_completion_tokens=600)).json()
    calls = expected["choices"][0]["message"]["tool_calls"]
    assert [block["input"] for block in whole["content"] if block["type"] == "tool_use"] == [
        json.loads(call["function"]["arguments"]) for call in calls
    ]
    assert whole["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
    lines = (await http.post("/v1/messages", json=body | {"stream": True})).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    joined = "".join(e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta")
    assert json.loads(joined) == json.loads(calls[0]["function"]["arguments"])
    assert (events[0]["type"], events[-2]["delta"]["stop_reason"]) == ("message_start", whole["stop_reason"])
    again = [
        {"type": "tool_result", "tool_use_id": whole["content"][-1]["id"], "content": [{"type": "text", "text": "r"}]}
    ]
    history = [*ASKED, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": again}]
    after = await http.post("/v1/messages", json=body | {"messages": history, "tool_choice": None, "max_tokens": 2})
    assert after.status_code == 200, after.text
    for field, value in (("thinking", {"type": "x"}), ("tools", [{"type": "bash_20250124"}]), ("messages", [{}])):
        refused = await http.post("/v1/messages", json=body | {field: value})
        assert refused.status_code == 400
        assert refused.json()["type"] == "error"
        assert refused.json()["error"]["message"].startswith(field)


async def test_tools_are_refused_by_name_where_the_vocabulary_is_too_small_to_know_the_template(
    http: httpx2.AsyncClient, home: Path, inference: Any
) -> None:
    plain = character_tokenizer("".join(sorted(set(string.printable) - set("zq"))))
    plain.settings = dataclasses.replace(plain.settings, chat_template=TEMPLATE)
    config = DecoderConfig(
        vocab_size=plain.vocab_size, max_seq_len=512, hidden_size=32, num_layers=1, num_heads=4, mechanism="mha"
    )
    save_model(home / "models" / "characters", Decoder(config), plain)
    await inference.served.load("characters", "", EngineConfig(num_threads=1))
    given = {"model": "characters", "enable_thinking": False}
    assert (await chat(http, **given)).status_code == 200
    refused = await chat(http, **given, tools=[WEATHER])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
