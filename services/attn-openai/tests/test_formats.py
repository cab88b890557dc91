"""The formats of other servers: errors in the words of what was sent, and the same answers as chat completions."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx2
import numpy as np
import pytest
from attn_gateway import GatewaySettings

SAID = [{"role": "user", "content": "to be?"}]
CUT = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a'}
ARRAY: dict[str, Any] = {"type": "array"}
TRIPLE = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "r"}]}]
STRICT = {"type": "object", "properties": {"a": {"not": {}}}}
FORMAT = {"type": "json_schema", "name": "x", "schema": STRICT, "strict": True}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/messages", {"messages": TRIPLE}, "messages[0].content[0].tool_use_id"),
        ("/v1/messages", {"system": "s", "messages": [{"role": "wat"}]}, "messages[0].role"),
        ("/v1/messages", {"system": 3}, "system.content"),
        ("/v1/messages", {"stop_sequences": 4}, "stop_sequences"),
        ("/v1/messages", {"max_tokens": 0}, "max_tokens"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": ARRAY}]}, "tools[0].input_schema.type"),
        ("/v1/messages", {"tools": [{"name": "f", "strict": True, "input_schema": STRICT}]}, "tools[0].input_schema"),
        ("/v1/responses", {"input": [{"role": "wat", "content": "x"}]}, "input[0].role"),
        ("/v1/responses", {"input": [CUT]}, "input[0].arguments"),
        ("/v1/responses", {"instructions": "s", "input": [{"role": "user", "content": [{}]}]},
         "input[0].content[0].type"),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "z", "output": "x"}]},
         "input[0].call_id"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"text": {"format": {"type": "wat"}}}, "text.format.type"),
        ("/v1/responses", {"text": {"format": FORMAT}}, "text.format.schema"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f", "parameters": ARRAY}]},
         "tools[0].parameters.type"),
        ("/api/chat", {"messages": [{"role": "wat"}]}, "messages[0].role"),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict"),
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"format": 3}, "format"),
        ("/api/chat", {"messages": [*SAID, {"role": "tool", "tool_name": "f", "content": "x"}]},
         "messages[1].tool_name"),
        ("/api/generate", {"images": ["?"]}, "images[0].image_url"),
    ],
)  # fmt: skip
async def test_an_error_names_the_field_that_was_sent(
    http: httpx2.AsyncClient, path: str, fields: dict[str, Any], named: str
) -> None:
    body: dict[str, Any] = {"model": "tiny"}
    body |= {"/v1/responses": {"input": "x"}, "/api/generate": {"prompt": "x"}}.get(path, {"messages": SAID})
    answer = await http.post(path, json=body | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{named}:"), message
    assert len(message) < 400
    assert path.startswith("/api") or ("param" in error) == (path == "/v1/responses")


async def test_ollamas_answers_are_those_of_chat_completions(http: httpx2.AsyncClient) -> None:
    options = {"temperature": 0.7, "seed": 5, "num_predict": 20, "top_k": 0, "top_p": 1}
    body = {"model": "tiny", "messages": SAID, "options": options, "keep_alive": "5m"}
    same = {"model": "tiny", "messages": SAID, "temperature": 0.7, "seed": 5, "max_tokens": 20}
    expected = (await http.post("/v1/chat/completions", json=same)).json()
    text = expected["choices"][0]["message"]["content"]
    whole = (await http.post("/api/chat", json=body | {"stream": False})).json()
    assert (whole["message"]["content"], whole["done"], whole["done_reason"]) == (text, True, "length")
    assert whole["eval_count"] == expected["usage"]["completion_tokens"] == 20
    assert whole["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    streamed = await http.post("/api/chat", json=body)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == text
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    asked = {"model": "tiny", "prompt": "to be?", "options": options}
    assert (await http.post("/api/generate", json=asked | {"stream": False})).json()["response"] == text
    pieces = (await http.post("/api/generate", json=asked)).text.splitlines()
    assert "".join(json.loads(piece)["response"] for piece in pieces) == text
    assert (await http.post("/api/generate", json={"model": "tiny", "stream": False})).json()["done_reason"] == "load"
    for path in ("/api/tags", "/api/ps"):
        assert [model["name"] for model in (await http.get(path)).json()["models"]] == ["tiny", "tiny-bert"]
    assert "embedding" in (await http.post("/api/show", json={"model": "tiny-bert"})).json()["capabilities"]
    missing = await http.post("/api/chat", json=body | {"model": "tinny"})
    assert (missing.status_code, type(missing.json()["error"])) == (404, str)


async def test_calls_by_ollamas_names_can_be_sent_back_with_their_results(http: httpx2.AsyncClient) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    }
    schema["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": schema}}
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    other = {"function": {"name": "other", "arguments": {}}}
    results = [{"role": "tool", "tool_name": "other", "content": "o"}, {"role": "tool", "tool_name": "weather",
               "content": "w"}]  # fmt: skip
    history = [*SAID, {"role": "assistant", "content": "", "tool_calls": [call, other]}, *results]
    body = {"model": "tiny", "messages": history, "tools": [tool], "stream": False, "options": {"num_predict": 2}}
    assert (await http.post("/api/chat", json=body)).status_code == 200
    made = await http.post("/api/chat", json=body | {"tools": [], "format": schema, "options": {"num_predict": 200}})
    answer = json.loads(made.json()["message"]["content"])
    assert answer["city"] in {"Rome", "Oslo"}


async def test_token_offsets_and_bytes_are_those_of_the_text(http: httpx2.AsyncClient) -> None:
    given = {"model": "tiny", "max_tokens": 40, "logprobs": 1, "seed": 1}
    body = {**given, "prompt": "to be", "logit_bias": {str(token): 8 for token in (194, 195, 164, 184, 226, 130, 172)}}
    choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    offsets, names = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert any(name.startswith("bytes:") for name in names)
    for name, start, end in zip(names, offsets, offsets[1:], strict=False):
        if not name.startswith("bytes:"):
            assert choice["text"][start:end] == name
    assert offsets == sorted(offsets)
    assert offsets[-1] < len(choice["text"]) + 1
    chat = {"model": "tiny", "messages": SAID, "max_tokens": 40, "logprobs": True, "logit_bias": body["logit_bias"]} | {
        "skip_special_tokens": False
    }
    said = (await http.post("/v1/chat/completions", json=chat)).json()["choices"][0]
    joined = b"".join(bytes(token["bytes"]) for token in said["logprobs"]["content"])
    assert joined.decode(errors="replace") == said["message"]["content"]


async def test_texts_token_ids_and_scores_of_an_encoder_agree(http: httpx2.AsyncClient) -> None:
    async def asked(path: str, **fields: Any) -> Any:
        answer = await http.post(path, json={"model": "tiny-bert", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    texts = ["ab", "cd", "abcdabcdabcdabcd"]
    ids = [(await asked("/tokenize", prompt=text))["tokens"] for text in texts]
    by_text = await asked("/v1/embeddings", input=texts, truncate_prompt_tokens=-1)
    by_ids = await asked("/v1/embeddings", input=ids, truncate_prompt_tokens=-1)
    rows = np.array([each["embedding"] for each in by_text["data"]])
    np.testing.assert_allclose([each["embedding"] for each in by_ids["data"]], rows, rtol=0, atol=1e-6)
    assert by_ids["usage"] == by_text["usage"]
    assert (await asked("/v1/embeddings", input=ids[0]))["data"][0]["embedding"] == pytest.approx(rows[0], abs=1e-6)
    cosines = (rows @ rows[0]) / np.linalg.norm(rows, axis=1)
    scores = await asked("/v1/score", text_1="ab", text_2=texts, truncate_prompt_tokens=-1)
    assert [each["score"] for each in scores["data"]] == pytest.approx(cosines.tolist(), abs=1e-5)
    ranked = await asked("/v2/rerank", query="ab", documents=texts, top_n=2, truncate_prompt_tokens=-1)
    assert [each["index"] for each in ranked["results"]] == np.argsort(-cosines)[:2].tolist()
    for wrong in ([[0, 9999]], ["a", [0]], [texts[2]], [ids[2]]):
        answer = await http.post("/v1/embeddings", json={"model": "tiny-bert", "input": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("input")


async def test_tokens_may_end_be_the_only_ones_or_never_come(http: httpx2.AsyncClient) -> None:
    async def tokens(**fields: Any) -> tuple[list[int], str]:
        body = {"model": "tiny", "prompt": "to be", "max_tokens": 30, "seed": 2, **fields}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return (await http.post("/tokenize", json={"model": "tiny", "prompt": choice["text"] or " "})).json()[
            "tokens"
        ], choice["finish_reason"]

    only, reason = await tokens(allowed_token_ids=[65, 66, 67], temperature=40)
    assert set(only) == {65, 66, 67}
    assert reason == "length"
    before, reason = await tokens(allowed_token_ids=[65, 66, 67], stop_token_ids=[66], ignore_eos=True, temperature=40)
    assert (reason, 66 in before) == ("stop", False)
    assert before == only[: only.index(66)] or not only.index(66)
    word = (await http.post("/detokenize", json={"model": "tiny", "tokens": [65, 66]})).json()["prompt"]
    without, _ = await tokens(allowed_token_ids=[65, 66, 67], bad_words=[word], temperature=40, max_tokens=100)
    assert {65, 66, 67} == set(without)
    assert (65, 66) not in set(itertools.pairwise(without))
    none = {"model": "tiny", "prompt": "x", "allowed_token_ids": [65], "bad_words": [word[0]]}
    assert (await http.post("/v1/completions", json=none)).json()["error"]["param"] == "allowed_token_ids"
    for field in ("stop_token_ids", "allowed_token_ids"):
        body = {"model": "tiny", "prompt": "x", field: [99999]}
        assert (await http.post("/v1/completions", json=body)).json()["error"]["param"].startswith(field)


async def test_log_probabilities_of_a_prompt_are_those_of_its_echo(http: httpx2.AsyncClient) -> None:
    given = {"model": "tiny", "prompt": "to be or not", "max_tokens": 1}
    echo = (await http.post("/v1/completions", json=given | {"echo": True, "logprobs": 0})).json()["choices"][0]
    asked = (await http.post("/v1/completions", json=given | {"prompt_logprobs": 0})).json()["choices"][0]
    found = [next(iter(row.values()))["logprob"] for row in asked["prompt_logprobs"][1:]]
    assert found == pytest.approx(echo["logprobs"]["token_logprobs"][1 : len(found) + 1])
    assert asked["prompt_logprobs"][0] is None
    assert asked["text"] == "" or not asked["text"].startswith("to be")


@pytest.mark.parametrize("settings", [GatewaySettings(port=0, http_port=0, cors_origins=("https://mine.example",))])
async def test_only_pages_of_the_origins_that_are_named_may_call(
    http: httpx2.AsyncClient, settings: GatewaySettings
) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,authorization"}
    mine, other = ({"origin": origin} for origin in ("https://mine.example", "https://other.example"))
    allowed = await http.options("/v1/chat/completions", headers=mine | asked)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, mine["origin"])
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    assert (await http.options("/v1/chat/completions", headers=other | asked)).status_code == 400
    body = json.dumps({"model": "tiny", "messages": SAID, "max_tokens": 1}).encode()
    json_said, form = {"content-type": "application/json"}, {"content-type": "application/x-www-form-urlencoded"}
    fetched = form | {"sec-fetch-site": "cross-site"}
    cases = (mine | json_said, 200), (other, 400), ({}, 200), (form, 200), (form | other, 400), (fetched, 400)
    for headers, status in cases:
        # A page can send such a body unasked, and its browser then says so; other clients do not.
        assert (await http.post("/v1/chat/completions", content=body, headers=headers)).status_code == status
