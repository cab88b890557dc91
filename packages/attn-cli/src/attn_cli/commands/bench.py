"""`attn bench serve` and `attn bench latency`, with the options and report of vLLM's commands."""

from __future__ import annotations

import asyncio
import json as json_module
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from attn_core.errors import InvalidValue, UserError
from attn_schema import ConnectionOptions
from attn_schema.flags import with_flags
from attn_schema.output import Json, print_json
from attn_schema.text_files import lines_of, read_text

from attn_cli.serving_load import (
    METRICS,
    AttnBackend,
    Backend,
    LoadRequest,
    OpenAIBackend,
    RequestTimes,
    arrivals,
    percentile,
    random_requests,
    report,
    run_requests,
    summary,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure the performance of an attn server, or of any with an OpenAI-compatible API.",
)

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)
BackendName = Literal["attn", "openai", "openai-chat"]
Model = Annotated[str, typer.Option("--model", "-m", help="Name of a model that the server has loaded.")]
BackendOption = Annotated[
    BackendName, typer.Option(help="attn (gRPC at --address), or openai or openai-chat (HTTP at --base-url).")
]
BaseUrl = Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.", envvar="OPENAI_BASE_URL")]


def backend_of(
    name: BackendName, model: str, base_url: str, connection: ConnectionOptions, *, ignore_eos: bool
) -> AttnBackend | OpenAIBackend:
    """The client of the server that is measured."""
    from attn_client import ClientSettings

    settings = ClientSettings.of(connection)
    if name == "attn":
        return AttnBackend(settings, model, ignore_eos=ignore_eos)
    url = base_url.removesuffix("/").removesuffix("/v1")
    return OpenAIBackend(url, model, chat=name == "openai-chat", ignore_eos=ignore_eos, token=settings.token)


def read_requests(path: Path, output_len: int) -> list[LoadRequest]:
    """Read requests from a file of JSON lines with `prompt` and optionally `output_len`.

    Raises `UserError` for a malformed line, `InvalidValue` for a file that is empty or cannot be read.
    """
    found = []
    for number, line in enumerate(lines_of(read_text(path, "dataset_path")), start=1):
        try:
            values = json_module.loads(line)
            found.append(LoadRequest(str(values["prompt"]), int(values.get("output_len", output_len))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: line {number} is no JSON object with a prompt", field="dataset_path") from error
    if not found:
        raise InvalidValue.of("dataset_path", path, "a file of at least one line")
    return found


def parse_goodput(goals: list[str] | None) -> dict[str, float]:
    """Parse goals such as "ttft:200" into milliseconds by metric; raises `InvalidValue` for malformed goals."""
    found = {}
    for goal in goals or ():
        name, _, value = goal.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            raise InvalidValue.of("goodput", goal, "METRIC:MILLISECONDS, such as ttft:200") from None
        if name not in {"ttft", "tpot", "e2el"}:
            raise InvalidValue.of("goodput", goal, "ttft, tpot or e2el before the colon")
    return found


def parse_numbers(text: str, field: str) -> list[float]:
    """Parse percentiles such as "50,99"; raises `InvalidValue` unless all are numbers from 0 to 100."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= number <= 100 for number in found):
        raise InvalidValue.of(field, text, "percentiles from 0 to 100, separated by commas")
    return found


@app.command("serve")
@with_flags
def serve_command(
    *,
    model: Model,
    backend: BackendOption = "attn",
    base_url: BaseUrl = "http://127.0.0.1:8000",
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 100,
    random_input_len: Annotated[int, typer.Option(min=1, help="Words per prompt, about one token each.")] = 128,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate per request.")] = 64,
    random_range_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Vary lengths uniformly by ± this fraction.")
    ] = 0,
    dataset_path: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help='JSON lines {"prompt", "output_len"} instead.')
    ] = None,
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf sends all at once.")] = float("inf"),
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distribution of times between requests; 1 is a Poisson process.")
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Maximum number of concurrent requests.")] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Warm-up requests, which are not measured.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate past end-of-sequence tokens.")] = False,
    percentile_metrics: Annotated[
        str, typer.Option(help=f"Metrics to report, separated by commas: {', '.join(METRICS)}.")
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report, separated by commas.")] = "99",
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="METRIC:MS", help="Latency goal for goodput; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    result_filename: Annotated[Path | None, typer.Option(help="Write the figures to this file as JSON.")] = None,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Send requests at a given rate, and report throughput, latencies and goodput as `vllm bench serve` does.

    Example: `attn bench serve --model smollm2-135m-instruct --num-prompts 50 --request-rate 4 --goodput ttft:500`
    """
    percentiles, shown = parse_numbers(metric_percentiles, "metric_percentiles"), percentile_metrics.split(",")
    if unknown := [name for name in shown if name not in METRICS]:
        raise InvalidValue.of("percentile_metrics", unknown[0], ", ".join(METRICS))
    for name, value in (("burstiness", burstiness), ("request_rate", request_rate)):
        if not value > 0:
            raise InvalidValue.of(name, value, "above 0")
    goals = parse_goodput(goodput)
    if dataset_path is None:
        requests = random_requests(
            num_prompts, random_input_len, random_output_len, range_ratio=random_range_ratio, seed=seed
        )
    else:
        given = read_requests(dataset_path, random_output_len)
        requests = [given[number % len(given)] for number in range(num_prompts)]

    async def run() -> tuple[list[RequestTimes], float]:
        async with backend_of(backend, model, base_url, connection, ignore_eos=ignore_eos) as server:
            await _warm_up(server, requests[0], num_warmups)
            sent = arrivals(len(requests), request_rate, burstiness, seed)
            return await run_requests(server, requests, sent, max_concurrency=max_concurrency)

    found, seconds = asyncio.run(run())
    figures = summary(found, seconds, percentiles, goals)
    if result_filename is not None:
        result_filename.write_text(json_module.dumps({"model": model, "backend": backend, **figures}, indent=1) + "\n")
    if json:
        print_json(figures)
    else:
        typer.echo(report(figures, shown, percentiles))
    if errors := {times.error for times in found if times.error}:
        raise UserError(f"{figures['failed']} requests failed; the first: {sorted(errors)[0]}")


async def _warm_up(server: Backend, request: LoadRequest, count: int) -> None:
    """Send a request `count` times before the measurement; raises the error of a request that fails."""
    for _ in range(count):
        times = RequestTimes(start=time.perf_counter())
        await server(request, times)


@app.command("latency")
@with_flags
def latency_command(
    *,
    model: Model,
    backend: BackendOption = "attn",
    base_url: BaseUrl = "http://127.0.0.1:8000",
    input_len: Annotated[int, typer.Option(min=1, help="Words per prompt, about one token each.")] = 32,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Concurrent requests per batch.")] = 8,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Warm-up batches, which are not measured.")] = 2,
    num_iters: Annotated[int, typer.Option(min=1, help="Number of measured batches.")] = 10,
    ignore_eos: Annotated[bool, typer.Option(help="Generate past end-of-sequence tokens.")] = True,
    output_json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    json: Json = False,
    connection: ConnectionOptions,
) -> None:
    """Measure the end-to-end latency of a batch of requests, as `vllm bench latency` does."""

    async def run() -> list[float]:
        spent = []
        async with backend_of(backend, model, base_url, connection, ignore_eos=ignore_eos) as server:
            for number in range(num_iters_warmup + num_iters):
                # New prompts for each batch, which the prefix cache does not hold.
                requests = random_requests(batch_size, input_len, output_len, seed=number)
                found, seconds = await run_requests(server, requests, arrivals(batch_size, float("inf"), 1.0, 0))
                if errors := [times.error for times in found if times.error]:
                    raise UserError(f"{len(errors)} requests failed; the first: {errors[0]}")
                spent.append(seconds)
        return spent[num_iters_warmup:]

    latencies = asyncio.run(run())
    percentiles = {str(percent): percentile(latencies, percent) for percent in LATENCY_PERCENTILES}
    figures = {"avg_latency": sum(latencies) / len(latencies), "latencies": latencies, "percentiles": percentiles}
    if output_json is not None:
        output_json.write_text(json_module.dumps(figures, indent=1) + "\n")
    if json:
        print_json(figures)
        return
    typer.echo(f"Avg latency: {figures['avg_latency']} seconds")
    for percent, seconds in percentiles.items():
        typer.echo(f"{percent}% percentile latency: {seconds} seconds")
