"""Every field of every request, at any depth, takes every JSON type: an answer or a refusal, never a fault of ours."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
from attn_openai.app import POSTS

DEEP: Any = 1
for _ in range(480):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**70, 1e308, "", "x", "\0\ud800", "1", "{", "[1]", "[" * 50_000, [], [1], [None],
    ["x"], [[]], [{}], DEEP, {"a": DEEP}, {}, {"a": 1}, {"1": "x"}, {"type": "object"}, {"type": "function"},
    {"type": None}, {"type": []},
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "a"}]},
    {"role": "user", "content": "b", "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "c", "tool_call_id": "c"},
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"a": {}}}}}
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "n": 1, "stop": ["zz"], "seed": 1, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "logit_bias": {"3": 1.0}, "stream": True, "stream_options": {"include_usage": True},
    "user": "u", "timeout": 60.0, "top_k": 5, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0,
    "min_tokens": 0, "ignore_eos": False,
}  # fmt: skip
INPUT = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
    {"type": "function_call_output", "call_id": "c", "output": "o"},
]
NAMED = {"type": "function", "function": {"name": "f"}}
FORMAT = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}
FIRST = {"messages": MESSAGES[:1], "max_tokens": 1}
EXAMPLES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        {"messages": MESSAGES, "max_completion_tokens": 1, "logprobs": True, "top_logprobs": 1, **SAMPLING},
        {**FIRST, "tools": [TOOL], "tool_choice": NAMED},
        {**FIRST, "tools": [TOOL]},
        {**FIRST, "response_format": SCHEMA, "parallel_tool_calls": True},
        *({**FIRST, "structured_outputs": {name: None}} for name in ("json", "regex", "choice", "grammar")),
        {"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 1},
    ),
    "/v1/completions": (
        {"prompt": ["a", [5, 6]], "max_tokens": 1, "echo": True, "logprobs": 1, "best_of": 1, **SAMPLING},
        {"prompt": "a", "max_tokens": 1, "use_beam_search": True, "num_beams": 2, "early_stopping": True},
        {
            "prompt": "a",
            "max_tokens": 1,
            "num_speculative_tokens": 1,
            "structured_outputs": {"json": {"type": "object"}},
        },
    ),
    "/v1/responses": (
        {"input": INPUT, "max_output_tokens": 1, "include": ["message.output_text.logprobs"]},
        {"input": "a", "max_output_tokens": 1, "tools": [TOOL]},
        {"input": "a", "max_output_tokens": 1, "instructions": "i", "text": FORMAT},
    ),
    "/v1/messages": (
        {
            "max_tokens": 1,
            "system": [{"type": "text", "text": "s"}],
            "thinking": {"type": "enabled"},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "o"}]},
            ],
        },
    ),
    "/api/chat": (
        {
            "messages": [
                {"role": "user", "content": "a", "images": ["AAAA"]},
                {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [{"function": CALL["function"]}]},
                {"role": "tool", "tool_name": "f", "content": "o"},
            ],
            "options": {"num_predict": 1, "stop": ["zz"], "seed": 1},
            "tools": [TOOL],
            "think": False,
        },
        {"messages": MESSAGES[1:2], "options": {"num_predict": 1}, "format": {"type": "object"}},
    ),
    "/api/generate": ({"prompt": "a", "system": "s", "options": {"num_predict": 1}},),
    "/rerank": ({"query": "a", "documents": ["b", "c"], "top_n": 1},),
    "/score": ({"text_1": "a", "text_2": ["b", "c"]},),
    "/v1/embeddings": ({"input": ["a b"], "encoding_format": "float", "dimensions": 3},),
    "/tokenize": ({"prompt": "a"}, {"messages": MESSAGES[:2]}),
    "/detokenize": ({"tokens": [5, 6]},),
}


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a JSON value, but the whole."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inside:
        yield (*place, key)
        yield from places(below, (*place, key))


def changed(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(body)
    holder: Any = found
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return found


def cases(path: str) -> Iterator[tuple[tuple[Any, ...], Any, dict[str, Any]]]:
    """The examples of a path with each value in each place, and each field of the request that they lack."""
    kind = POSTS[path].kind if path in POSTS else None
    fields = set() if kind is None else {field.encode_name for field in msgspec.structs.fields(kind)} - {"model"}
    known: set[tuple[Any, ...]] = {(name,) for body in EXAMPLES[path] for name in body}
    first, *others = EXAMPLES[path]
    for place in [*places(first), *sorted({(name,) for name in fields} - known)]:
        yield from ((place, value, changed(first, place, value)) for value in VALUES)
    seen = set(places(first))
    for body in others:
        for place in set(places(body)) - (seen if "tools" not in body else set()):
            yield from ((place, value, changed(body, place, value)) for value in VALUES)


@pytest.mark.parametrize("path", EXAMPLES)
async def test_no_value_of_any_field_is_a_fault_of_ours(http: httpx2.AsyncClient, path: str, some: Any) -> None:
    model = "tiny-bert" if path in {"/v1/embeddings", "/rerank", "/score"} else "tiny"
    headers, faults, answered = {"content-type": "application/json"}, [], 0
    # There are 29 values: another fourth of them for each place.
    for place, value, body in some(cases(path), 4):
        # A lone surrogate is an escape here, as clients may send it.
        answer = await http.post(path, content=json.dumps({"model": model, **body}).encode(), headers=headers)
        answered += answer.status_code == 200
        if answer.status_code >= 500 or '"code":"internal"' in answer.text:
            faults.append((place, value, answer.status_code, answer.text[-200:]))
    assert not faults
    assert answered
