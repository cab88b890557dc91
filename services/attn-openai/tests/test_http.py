"""What HTTP refuses and how: fields, bodies, tokens, hosts, deadlines; and callers who go away."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from attn_gateway import Gateway, GatewaySettings, serving
from attn_openai.app import PATHS
from attn_openai.server import UvicornServer

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "to be?"}], "max_completion_tokens": 4}
ELSEWHERE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
NO_BASE64 = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAAA"}}
LONG = CHAT | {"max_completion_tokens": 900, "ignore_eos": True}


async def until_running(engine: Any) -> None:
    """Wait until the engine computes for somebody."""
    async with asyncio.timeout(60):
        while True:
            if (await engine.stats()).running:
                return
            await asyncio.sleep(0.005)


async def post(http: httpx2.AsyncClient, body: Any, path: str = "/v1/chat/completions") -> httpx2.Response:
    return await http.post(path, json=body)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 65}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": 5}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [ELSEWHERE]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [NO_BASE64]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"timeout": 0}, "timeout"),
    ],
)
async def test_a_field_that_is_not_understood_is_refused_by_name(
    http: httpx2.AsyncClient, changes: dict[str, Any], param: str
) -> None:
    answer = await post(http, CHAT | changes)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


async def test_neutral_values_of_fields_that_are_not_followed_are_accepted(http: httpx2.AsyncClient) -> None:
    neutral = {"store": False, "service_tier": "auto", "metadata": None, "user": "ann", "top_k": -1, "stop": None}
    assert (await post(http, CHAT | neutral)).status_code == 200


async def test_bodies_that_are_no_json_objects_are_refused(http: httpx2.AsyncClient, gateway: Gateway) -> None:
    path, headers = "/v1/chat/completions", {"content-type": "application/json"}
    for body in (b"{", b"[]", b"\xff", b"[" * 100_000):
        answer = await http.post(path, content=body, headers=headers)
        assert answer.status_code == 400, body[:10]
        assert answer.json()["error"]["param"] == "body"
    large = b" " * (gateway.settings.max_request_bytes + 1)
    assert (await http.post(path, content=large, headers=headers)).status_code == 400
    # What a page of another site may send without asking is not let in.
    simple = await http.post(path, content=json.dumps(CHAT), headers={"content-type": "text/plain"})
    assert simple.json()["error"]["param"] == "content-type"


async def test_every_answer_has_the_request_id_of_the_caller(http: httpx2.AsyncClient) -> None:
    good = await http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
    bad = await http.post("/v1/chat/completions", json={}, headers={"x-request-id": "mine-2"})
    assert (good.headers["x-request-id"], bad.headers["x-request-id"]) == ("mine-1", "mine-2")
    again = await http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-1"})
    assert again.json()["id"] != good.json()["id"]  # that of an answer is the server's own
    assert len((await http.get("/v1/models")).headers["x-request-id"]) == 32


async def test_pages_of_other_hosts_are_refused_on_a_server_without_tokens(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/v1/models", headers={"host": "evil.example"})).status_code == 400
    assert (await http.get("/v1/models", headers={"host": "testserver"})).status_code == 400
    assert (await http.get("/v1/models", headers={"host": "localhost:1"})).status_code == 200


@pytest.mark.parametrize("settings", [GatewaySettings(port=0, http_port=0, token="one", other_tokens=("two",))])
async def test_tokens_are_those_of_grpc(http: httpx2.AsyncClient, settings: GatewaySettings) -> None:
    for path in ("/v1/models", "/v1/models/tiny"):
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers={"authorization": "Bearer three"})).status_code == 401
        for token in settings.tokens:
            assert (await http.get(path, headers={"authorization": f"Bearer {token}"})).status_code == 200
    refused = await post(http, CHAT)
    assert refused.json()["error"]["type"] == "authentication_error"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert (await http.get("/health")).status_code == 200
    stream = CHAT | {"stream": True}
    assert (await post(http, stream)).status_code == 401
    answer = await http.post("/v1/chat/completions", json=stream, headers={"authorization": "Bearer two"})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"error"' not in answer.text


async def test_tokens_may_be_in_a_file_and_other_names_of_the_host_are_let_in_then(
    inference: Any, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text("secret\n")
    file.chmod(0o600)
    server = UvicornServer()
    async with (
        serving([inference], GatewaySettings(port=0, http_port=0, token_file=file), http=server),
        httpx2.AsyncClient(base_url=f"http://{server.address}") as http,
    ):
        headers = {"host": "models.example", "authorization": "Bearer secret"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
        assert (await http.get("/v1/models", headers={"host": "models.example"})).status_code == 401


async def test_a_deadline_ends_the_request_with_504(http: httpx2.AsyncClient) -> None:
    answer = await post(http, LONG | {"timeout": 0.05})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


async def test_a_deadline_within_a_stream_is_told_in_the_stream(http: httpx2.AsyncClient) -> None:
    answer = await post(http, LONG | {"timeout": 0.3, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert answer.status_code == 200
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_who_goes_away_frees_the_engine(
    http: httpx2.AsyncClient, inference: Any, url: str, stream: bool
) -> None:
    engine = inference.served.serving("tiny").engine
    async with httpx2.AsyncClient(base_url=url) as other:
        asking = asyncio.ensure_future(post(other, LONG | {"stream": stream, "n": 8}))
        await until_running(engine)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(60):
        while True:
            stats = await engine.stats()
            if not stats.running + stats.waiting:
                break
            await asyncio.sleep(0.01)
    assert stats.generated_tokens < 8 * 900


async def test_health_follows_the_services_and_a_stopped_server_answers_no_more(inference: Any) -> None:
    server = UvicornServer()
    async with serving([inference], GatewaySettings(port=0, http_port=0), http=server) as gateway:
        async with httpx2.AsyncClient(base_url=f"http://{server.address}") as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/version")).json()["version"]
            gateway._serving = False
            assert (await http.get("/health")).status_code == 503
        address = server.address
    async with httpx2.AsyncClient() as http:
        with pytest.raises(httpx2.ConnectError):
            await http.get(f"http://{address}/health")


async def test_a_port_in_use_is_told_before_any_model_is_loaded(inference: Any, gateway: Gateway) -> None:
    port = int(gateway.http.address.rsplit(":", 1)[1])  # type: ignore[union-attr]
    with pytest.raises(Exception, match=f"port {port} on 127.0.0.1 is in use"):
        async with serving([inference], GatewaySettings(port=0, http_port=port), http=UvicornServer()):
            pass


async def test_more_requests_than_allowed_are_refused_with_429(inference: Any) -> None:
    server = UvicornServer()
    async with (
        serving([inference], GatewaySettings(port=0, http_port=0, max_calls=1), http=server),
        httpx2.AsyncClient(base_url=f"http://{server.address}", timeout=60) as http,
    ):
        first = asyncio.ensure_future(post(http, LONG | {"n": 8}))
        await until_running(inference.served.serving("tiny").engine)
        second = await http.get("/v1/models")
        assert second.status_code == 429
        assert float(second.headers["retry-after"]) > 0
        assert (await first).status_code == 200


async def test_every_answer_says_what_is_left_of_the_tenants_limits(inference: Any, tmp_path: Path) -> None:
    file, server = tmp_path / "tokens", UvicornServer()
    file.write_text("a-token tenant=ann requests_per_minute=60 tokens_per_minute=6000\n")
    file.chmod(0o600)
    async with (
        serving([inference], GatewaySettings(port=0, http_port=0, token_file=file), http=server),
        httpx2.AsyncClient(base_url=f"http://{server.address}", headers={"authorization": "Bearer a-token"}) as http,
    ):
        whole = await post(http, CHAT)
        assert whole.status_code == 200, whole.text
        assert whole.headers["x-ratelimit-limit-requests"] == "60"
        used, left = whole.json()["usage"]["total_tokens"], whole.headers["x-ratelimit-remaining-tokens"]
        assert 1000 - used <= int(left) < 1000  # ten seconds of 6000 a minute; some may have come back
        streamed = await post(http, CHAT | {"stream": True})
        assert int(streamed.headers["x-ratelimit-remaining-requests"]) < int(
            whole.headers["x-ratelimit-remaining-requests"]
        )
        assert 0 < int(streamed.headers["x-ratelimit-reset-requests"].removesuffix("ms")) <= 10_000
        # Of a request that makes many calls, one is counted.
        assert int(whole.headers["x-ratelimit-remaining-requests"]) == 9
        several = {"model": "tiny", "prompt": ["to be"] * 3, "max_tokens": 600}
        assert (await http.post("/v1/completions", json=several)).status_code == 200
        refused = await http.get("/v1/models")
        assert (refused.status_code, refused.headers["x-ratelimit-remaining-tokens"]) == (429, "0")


async def test_every_path_of_the_table_is_answered_and_no_other(http: httpx2.AsyncClient) -> None:
    for key in PATHS:
        method, path = key.split()
        answer = await http.request(method, path.split("/{")[0])
        assert answer.status_code not in {404, 405}, key
    unknown = await http.get("/v1/chat/completion")
    assert unknown.status_code == 404
    assert "/v1/chat/completions" in unknown.json()["error"]["message"]
    assert (await http.get("/v1/chat/completions")).status_code == 405


async def test_small_answers_do_not_wait_for_acknowledgements(http: httpx2.AsyncClient) -> None:
    spent = []
    for _ in range(20):
        start = time.perf_counter()
        await http.get("/version")
        spent.append(time.perf_counter() - start)
    assert sorted(spent)[2] < 0.03  # with Nagle's algorithm each takes 40 ms


async def test_a_model_sleeps_and_wakes_up_as_in_vllm(http: httpx2.AsyncClient) -> None:
    async def asks(method: str, path: str) -> Any:
        answer = await http.request(method, path)
        return answer.json() if answer.status_code == 200 else answer.status_code

    before = (await post(http, CHAT | {"temperature": 0})).json()["choices"]
    assert await asks("GET", "/is_sleeping?model=tiny") == {"is_sleeping": False}
    assert await asks("POST", "/sleep?level=1&mode=abort&model=tiny") == {"is_sleeping": True}
    assert (await post(http, CHAT)).status_code == 503
    assert await asks("POST", "/wake_up?model=tiny") == {"is_sleeping": False}
    assert (await post(http, CHAT | {"temperature": 0})).json()["choices"] == before
    refused = {"/sleep": 400, "/sleep?model=tiny&tags=weights": 400, "/sleep?model=tiny&mode=keep": 400}
    assert {path: await asks("POST", path) for path in refused} == refused, "two models are served"
    assert await asks("POST", "/sleep?model=none") == 404
