"""What Prometheus reads of a running server: every metric of the table, and numbers that agree with what was asked."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_gateway import Gateway, GatewaySettings
from attn_gateway.metrics import METRICS
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[1] / "dashboards" / "attn.json"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "to be?"}], "max_completion_tokens": 6}


async def samples(http: httpx2.AsyncClient) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by its name and labels."""
    text = (await http.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: Any, name: str, **labels: str) -> float:
    """The sum of all samples of a name with these labels."""
    return sum(
        value for (known, given), value in found.items() if known == name and labels.items() <= dict(given).items()
    )


async def test_counters_add_up_to_what_was_asked_over_http_and_grpc(http: httpx2.AsyncClient, gateway: Gateway) -> None:
    usages = [(await http.post("/v1/chat/completions", json=CHAT)).json()["usage"] for _ in range(3)]
    request = inference_pb2.GenerateRequest(
        model="tiny", prompt=common_pb2.Prompt(text="to be"), sampling=inference_pb2.SamplingParams(max_new_tokens=4)
    )
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        last = [answer async for answer in InferenceServiceStub(channel).Generate(request)][-1].usage
    found = await samples(http)
    prompts = sum(usage["prompt_tokens"] for usage in usages) + last.prompt_tokens
    generated = sum(usage["completion_tokens"] for usage in usages) + last.completion_tokens
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages) + last.cached_tokens
    assert total(found, "attn_prompt_tokens_total", model_name="tiny") == prompts
    assert total(found, "attn_generation_tokens_total", model_name="tiny") == generated
    assert total(found, "attn_prefix_cache_hits_total") == cached
    assert total(found, "attn_request_success_total") == 4
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert total(found, f"attn_{name}_count", model_name="tiny") == 4, name
    assert total(found, "attn_inter_token_latency_seconds_count") <= generated - 4
    first, whole = (
        total(found, f"attn_{name}_sum") for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds")
    )
    assert 0 < total(found, "attn_request_queue_time_seconds_sum") < first < whole
    assert total(found, "attn_calls_total", method="/attn.v1.InferenceService/Generate", code="OK") == 4


async def test_engines_and_models_are_asked_when_prometheus_asks(http: httpx2.AsyncClient) -> None:
    long = CHAT | {"max_completion_tokens": 900, "ignore_eos": True}
    asking = asyncio.ensure_future(http.post("/v1/chat/completions", json=long))
    running = used = 0.0
    async with asyncio.timeout(120):
        while not (running and used):
            if asking.done():  # between two looks
                asking = asyncio.ensure_future(http.post("/v1/chat/completions", json=long))
            found = await samples(http)
            running = max(running, total(found, "attn_num_requests_running", model_name="tiny", replica="0"))
            used = max(used, total(found, "attn_kv_cache_usage_perc", model_name="tiny"))
            await asyncio.sleep(0.01)
    assert (running, used <= 1) == (1, True)
    await asking
    assert total(await samples(http), "attn_models", state="serving") == 2


async def test_errors_are_counted_by_code_and_what_callers_make_up_is_no_label(http: httpx2.AsyncClient) -> None:
    await http.post("/v1/chat/completions", json=CHAT | {"model": "made-up"})
    await http.post("/v1/chat/completions", json=CHAT | {"timeout": 0.0001, "ignore_eos": True})
    await http.post("/v1/completions", json={"model": "tiny", "prompt": [9999]})
    found = await samples(http)
    for code in ("NOT_FOUND", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"):
        assert total(found, "attn_calls_total", code=code) >= 1, code
    assert not any("made-up" in dict(labels).values() for _, labels in found)


@pytest.mark.parametrize("settings", [GatewaySettings(port=0, http_port=0, token="one", other_tokens=("two",))])
async def test_tenants_are_told_apart_and_metrics_want_the_token_of_an_admin(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/metrics")).status_code == 401
    for token in ("one", "two", "two"):
        http.headers["authorization"] = f"Bearer {token}"
        await http.post("/v1/chat/completions", json=CHAT)
    assert (await http.get("/metrics")).status_code == 403
    http.headers["authorization"] = "Bearer one"
    found = await samples(http)
    tenants = {
        dict(labels)["tenant"]: value for (name, labels), value in found.items() if name == "attn_request_success_total"
    }
    assert sorted(tenants.values()) == [1, 2]
    assert "" not in tenants


async def test_http_requests_are_counted_by_route_and_status(http: httpx2.AsyncClient) -> None:
    await http.post("/v1/chat/completions", json=CHAT)
    await http.post("/v1/chat/completions", json=CHAT | {"temperature": -1})
    await http.get("/v1/chat/completions")
    await http.get("/made/up/path")
    asked = CHAT | {"max_completion_tokens": 900, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=asked) as stream:
        await anext(stream.aiter_lines())
    for _ in range(1000):
        if total(found := await samples(http), "attn_calls_total", code="CANCELLED"):
            break
        await asyncio.sleep(0.01)
    by_status = {status: total(found, "attn_http_requests_total", path="/v1/chat/completions", status=status)
                 for status in ("200", "400", "405")}  # fmt: skip
    assert by_status == {"200": 2, "400": 1, "405": 1}
    assert total(found, "attn_http_requests_total", status="404") == 1
    assert not any("made" in dict(labels).get("path", "") for _, labels in found)
    assert total(found, "attn_prompt_tokens_total") > total(found, "attn_request_prompt_tokens_sum") > 0  # the aborted


async def test_every_metric_of_the_table_is_shown_with_its_labels_and_no_other(http: httpx2.AsyncClient) -> None:
    await http.post("/v1/chat/completions", json=CHAT)
    text = (await http.get("/metrics")).text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    shown = {name.removesuffix("_total"): kind for name, kind in kinds.items() if not name.endswith("_created")}
    # What prometheus_client says of every process.
    assert "process_resident_memory_bytes" in shown
    shown = {name: kind for name, kind in shown.items() if not name.startswith("process_")}
    of_jobs = {"attn_jobs", "attn_training_tokens_per_second", "attn_training_step"}  # no training service runs here
    assert shown == {metric.name: metric.kind for metric in METRICS if metric.name not in of_jobs}
    labels = {metric.name: set(metric.labels) for metric in METRICS}
    for name, given in await samples(http):
        metric = next((m for m in METRICS if name in m.samples), None)
        if metric is not None:
            assert set(dict(given)) - {"le"} == labels[metric.name], name


def test_the_dashboard_asks_for_metrics_and_labels_of_the_table_alone() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    names = {sample: metric for metric in METRICS for sample in metric.samples}
    asked = set()
    for query in queries:
        found = re.findall(r"attn_\w+", query)
        assert found, query
        for name in found:
            assert name in names, f"{name} of {query}"
            asked.add(names[name].name)
        known = {label for name in found for label in names[name].labels} | {"le"}
        grouped = re.findall(r"(?:by|without) \(([^)]*)\)", query)
        used = {label.strip() for part in grouped for label in part.split(",")} | set(re.findall(r"(\w+)=~?\"", query))
        assert used <= known, query
    assert asked == {metric.name for metric in METRICS}, "every metric is on the dashboard"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed")
async def test_a_real_prometheus_scrapes_a_running_server(http: httpx2.AsyncClient, url: str, tmp_path: Path) -> None:
    await http.post("/v1/chat/completions", json=CHAT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target = url.removeprefix("http://")
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        f"scrape_configs: [{{job_name: attn, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    options = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    server = await asyncio.create_subprocess_exec(
        "prometheus", *options, f"--web.listen-address=127.0.0.1:{port}",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        found: list[Any] = []
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as prometheus:
            for _ in range(100):
                await asyncio.sleep(0.1)
                try:
                    answer = await prometheus.get("/api/v1/query", params={"query": "attn_generation_tokens_total"})
                except httpx2.HTTPError:
                    continue
                found = answer.json().get("data", {}).get("result", []) if answer.status_code == 200 else []
                if found:
                    break
        assert float(found[0]["value"][1]) == 6
        assert found[0]["metric"]["model_name"] == "tiny"
    finally:
        server.terminate()
        await server.wait()
