"""Requests under load: when they are sent, what is counted of them, and figures that agree with their definitions."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
import time
from pathlib import Path

import pytest
from attn_cli.commands.bench import parse_goodput, read_requests
from attn_cli.serving_load import (
    AttnBackend,
    LoadRequest,
    RequestTimes,
    arrivals,
    good,
    percentile,
    random_requests,
    report,
    run_requests,
    summary,
)
from attn_client import ClientSettings
from attn_core.errors import InvalidValue
from hypothesis import given
from hypothesis import strategies as st

FINITE = st.floats(0, 1e6)


@given(st.lists(FINITE, min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 10, 50, 90, 99):
        assert percentile(values, percent) == pytest.approx(expected[percent - 1], abs=1e-6)
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


def test_times_of_a_request_are_what_their_names_say() -> None:
    times = RequestTimes(start=0.0, ttft=0.5, itl=[0.1, 0.3], e2el=0.9, prompt_tokens=7, output_tokens=3)
    assert times.tpot == pytest.approx(0.2)
    assert good(times, {"ttft": 500, "tpot": 201})
    assert not good(times, {"ttft": 499})
    failed = RequestTimes(error="gone")
    figures = summary([times, times, failed], 2.0, [99], {"e2el": 900})
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["request_throughput"], figures["request_goodput"]) == (1.0, 1.0)
    assert (figures["output_throughput"], figures["total_token_throughput"]) == (3.0, 10.0)
    assert (figures["mean_ttft_ms"], figures["mean_itl_ms"]) == (pytest.approx(500), pytest.approx(200))
    text = report(figures, ["ttft", "itl"], [99])
    assert "Successful requests:                     2" in text
    assert "P99 ITL (ms):                            300.00" in text
    assert "TPOT" not in text


def test_requests_of_a_file_keep_all_characters_of_their_prompts(tmp_path: Path) -> None:
    prompts = ["a\u2028b\u2029c\x85d", "e"]
    lines = "\r\n".join(json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts)
    (tmp_path / "load.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert [request.prompt for request in read_requests(tmp_path / "load.jsonl", 3)] == prompts


def test_prompts_are_those_of_the_seed_and_of_the_lengths_asked_for() -> None:
    assert random_requests(3, 10, 5, seed=1) == random_requests(3, 10, 5, seed=1) != random_requests(3, 10, 5, seed=2)
    drawn = random_requests(200, 10, 20, range_ratio=0.5)
    assert {len(request.prompt.split()) for request in drawn} == set(range(5, 16))
    assert {request.output_len for request in drawn} == set(range(10, 31))


async def test_requests_come_at_the_rate_and_at_once_without_one() -> None:
    for rate, count, least, most in ((40.0, 40, 0.4, 60), (math.inf, 1000, 0, 10)):
        start = time.perf_counter()
        numbers = [number async for number in arrivals(count, rate, 1.0, seed=0)]
        assert numbers == list(range(count))
        assert least <= time.perf_counter() - start <= most


async def test_no_more_requests_run_than_allowed_and_an_error_is_counted_not_raised() -> None:
    inside, most = 0, 0

    async def backend(request: LoadRequest, times: RequestTimes) -> None:
        nonlocal inside, most
        inside, most = inside + 1, max(most, inside + 1)
        await asyncio.sleep(0.001)
        inside -= 1
        if request.output_len == 3:
            raise InvalidValue("refused")

    requests = [LoadRequest("x", number % 5) for number in range(20)]
    found, _ = await run_requests(backend, requests, arrivals(20, math.inf, 1.0, 0), max_concurrency=4)
    assert most == 4
    assert [bool(times.error) for times in found] == [request.output_len == 3 for request in requests]


def test_a_run_counts_the_tokens_that_the_server_counts(server) -> None:
    async def run() -> list[RequestTimes]:
        async with AttnBackend(ClientSettings(address=server.address), "words", ignore_eos=False) as backend:
            requests = [LoadRequest("a b c", 4), LoadRequest("d", 6)]
            return (await run_requests(backend, requests, arrivals(2, math.inf, 1.0, 0)))[0]

    first, second = asyncio.run(run())
    assert (first.prompt_tokens, first.output_tokens, len(first.itl)) == (3, 4, 3)
    assert (second.prompt_tokens, second.output_tokens, len(second.itl)) == (1, 6, 5)
    assert first.ttft is not None
    assert first.ttft + sum(first.itl) == pytest.approx(first.e2el)


@pytest.mark.parametrize("goal", ["ttft", "ttft:soon", "itl:5"])
def test_a_goal_that_is_no_metric_and_milliseconds_is_refused(goal: str) -> None:
    with pytest.raises(InvalidValue, match="goodput"):
        parse_goodput([goal])


def test_commands_print_vllms_report_and_write_its_figures(server, tmp_path, monkeypatch) -> None:
    import json

    from attn_cli.commands.bench import app
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    environment = {"ATTN_ADDRESS": server.address, "COLUMNS": "200"}
    words = ["serve", "--model", "words", "--num-prompts", "4", "--random-input-len", "3", "--random-output-len", "5"]
    shown = CliRunner().invoke(app, [*words, "--goodput", "ttft:9999", "--result-filename", "it.json"], env=environment)
    assert shown.exit_code == 0, shown.output
    figures = json.loads((tmp_path / "it.json").read_text())
    assert (figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (4, 12, 20)
    assert f"Median TTFT (ms):                        {figures['median_ttft_ms']:.2f}" in shown.stdout
    latency = CliRunner().invoke(
        app,
        ["latency", "--model", "words", "--input-len", "2", "--output-len", "3", "--num-iters", "3", "--json"],
        env=environment,
    )
    found = json.loads(latency.stdout)
    assert len(found["latencies"]) == 3
    assert found["percentiles"]["50"] == pytest.approx(statistics.median(found["latencies"]))


def test_top_shows_models_and_open_jobs_and_rates_since_the_last_look(server) -> None:
    from attn_cli.commands.top import Snapshot
    from attn_client import Client
    from attn_schema import EngineStats, ModelInfo, ModelState

    with Client(ClientSettings(address=server.address, timeout=60)) as client:
        found = Snapshot.of(client)
    assert len(found.model_rows(None)) == 150
    assert {row["job"] for row in found.job_rows()} == {job.id for job in found.jobs if not job.state.final}
    model = ModelInfo(name="m", source="m", state=ModelState.SERVING)
    looks = [
        Snapshot(seconds, [model], {"m": EngineStats(generated_tokens=tokens, kv_tokens_used=1, kv_tokens_total=4)}, [])
        for seconds, tokens in ((10.0, 100), (12.0, 150), (13.0, 0))
    ]
    rates = [now.model_rows(before)[0]["tokens/s"] for before, now in itertools.pairwise(looks)]
    assert rates == ["25.0", "-"]  # the engine was started anew before the last look
    assert looks[0].model_rows(None)[0]["KV cache"] == "25.0%"
