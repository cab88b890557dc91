"""gRPC calls as JSON over HTTP: the same answers, the same refusals, and a document that describes them."""

from __future__ import annotations

import base64
import json
import re
import struct
from typing import Any

import grpc.aio
import httpx2
import pytest
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_gateway import Gateway

INFERENCE = "/attn.v1.InferenceService"


async def post(http: httpx2.AsyncClient, path: str, **body: Any) -> httpx2.Response:
    return await http.post(path, json=body)


async def test_scores_are_those_of_grpc(http: httpx2.AsyncClient, gateway: Gateway) -> None:
    answer = (await post(http, f"{INFERENCE}/Score", model="tiny", prompts=[{"text": "to be"}], top_logprobs=2)).json()
    request = inference_pb2.ScoreRequest(model="tiny", prompts=[common_pb2.Prompt(text="to be")], top_logprobs=2)
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        expected = await InferenceServiceStub(channel).Score(request)
    (score,) = answer["scores"]
    assert score["sum_logprob"] == pytest.approx(expected.scores[0].sum_logprob)
    assert [token["id"] for token in score["tokens"]] == [token.id for token in expected.scores[0].tokens]
    assert "logprob" not in score["tokens"][0]
    assert len(score["tokens"][1]["top_logprobs"]) == 2


async def test_attention_maps_are_lines_with_tensors_in_base64_or_as_lists(http: httpx2.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": {"text": "to be or"}, "heads": [0, 2]}
    coded = await post(http, f"{INFERENCE}/AttentionMaps", **body)
    listed = await post(http, f"{INFERENCE}/AttentionMaps?tensors=lists", **body)
    assert coded.headers["content-type"] == "application/x-ndjson"
    layers = [[json.loads(line)["result"] for line in answer.text.splitlines()] for answer in (coded, listed)]
    assert [layer["layer"] for layer in layers[0]] == [0, 1]
    for one, other in zip(*layers, strict=True):
        heads, queries, keys = map(int, one["attention_weights"]["shape"])
        flat = struct.unpack(f"<{heads * queries * keys}f", base64.b64decode(one["attention_weights"]["data"]))
        values = other["attention_weights"]["values"]
        assert [weight for head in values for row in head for weight in row] == pytest.approx(list(flat))
        for row in values[0]:
            assert sum(row) == pytest.approx(1, abs=1e-5)
        assert (heads, len(one["query_tokens"])) == (2, queries)


async def test_generated_text_is_a_line_a_message(http: httpx2.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": {"text": "to be"}, "sampling": {"max_new_tokens": 5, "seed": "3"}}
    lines = [
        json.loads(line)["result"] for line in (await post(http, f"{INFERENCE}/Generate", **body)).text.splitlines()
    ]
    assert sum(len(line["tokens"]) for line in lines) == 5
    assert lines[-1]["finish_reason"] == "FINISH_REASON_LENGTH"


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        (f"{INFERENCE}/Score", {"model": "tiny", "prompt": []}, 400, "prompt"),
        (f"{INFERENCE}/Score", {"model": "tinny", "prompts": [{"text": "a"}]}, 404, "did you mean 'tiny'"),
        (f"{INFERENCE}/Generate", {"model": "tiny", "prompt": {"text": "a"}, "sampling": {"top_p": 2}}, 400, "top_p"),
        (f"{INFERENCE}/Scores", {}, 404, "/attn.v1.InferenceService/Score"),
        ("/attn.v1.ModelService/LoadModel", {"name": "no such", "engine": {"dtype": 5}}, 400, "dtype"),
    ],
)
async def test_refusals_are_those_of_grpc_in_the_shape_of_all_errors(
    http: httpx2.AsyncClient, path: str, body: dict[str, Any], status: int, word: str
) -> None:
    answer = await post(http, path, **body)
    assert answer.status_code == status, answer.text
    assert word in answer.json()["error"]["message"]


async def test_a_deadline_is_a_header_and_ends_a_stream_aloud(http: httpx2.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": {"text": "a"}, "sampling": {"max_new_tokens": 900, "ignore_eos": True}}
    path, header = f"{INFERENCE}/Generate", "connect-timeout-ms"
    answer = await http.post(path, json=body, headers={header: "300"})
    last = answer.json() if answer.status_code == 504 else json.loads(answer.text.splitlines()[-1])
    assert last["error"]["code"] == "deadline_exceeded"
    assert (await http.post(path, json=body, headers={header: "soon"})).json()["error"]["param"] == header


async def test_the_document_describes_every_path_and_every_reference_resolves(
    http: httpx2.AsyncClient, gateway: Gateway
) -> None:
    document = (await http.get("/openapi.json")).json()
    assert gateway.calls.rows.keys() < document["paths"].keys()
    assert "/v1/chat/completions" in document["paths"]
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references
    assert references <= schemas.keys()
    sampling = schemas["attn.v1.SamplingParams"]["properties"]
    assert sampling["min_p"]["type"] == "number"
    assert "Nguyen" in sampling["min_p"]["description"]
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]


async def test_the_page_needs_no_network_and_names_every_path(http: httpx2.AsyncClient, gateway: Gateway) -> None:
    answer = await http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://", answer.text)
    assert all(name in answer.text for name in gateway.calls.rows)
