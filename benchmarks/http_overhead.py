"""The overhead of HTTP over gRPC: the same completions by both, in turns, from a running server.

    attn serve --model smollm2-135m-instruct --http-port 8000
    python benchmarks/http_overhead.py --model smollm2-135m-instruct --http http://127.0.0.1:8000

Prints the median and 90th percentile of one-token completions in milliseconds, then, for many streams at once, the
processor time of the gateway's process for each token, as its own metrics tell it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import time
from collections.abc import Awaitable, Callable

import grpc.aio
import httpx2
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub

PROMPT = "The capital of France is"


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    """The milliseconds of one call."""
    start = time.perf_counter()
    await call()
    return (time.perf_counter() - start) * 1000


async def measure(model: str, address: str, url: str, calls: int) -> None:
    request = inference_pb2.GenerateRequest(
        model=model, prompt=common_pb2.Prompt(text=PROMPT), sampling=inference_pb2.SamplingParams(max_new_tokens=1)
    )
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    async with grpc.aio.insecure_channel(address) as channel, httpx2.AsyncClient(base_url=url) as http:
        stub = InferenceServiceStub(channel)

        async def by_grpc() -> None:
            async for _ in stub.Generate(request):
                pass

        async def by_http() -> None:
            (await http.post("/v1/completions", json=body)).raise_for_status()

        times: dict[str, list[float]] = {"gRPC": [], "HTTP": []}
        for number in range(-10, calls):
            for name, call in (("gRPC", by_grpc), ("HTTP", by_http)):
                spent = await timed(call)
                if number >= 0:
                    times[name].append(spent)
    for name, found in times.items():
        print(f"{name}: p50 {statistics.median(found):.2f} ms, p90 {statistics.quantiles(found, n=10)[-1]:.2f} ms")
    print(f"HTTP over gRPC, p50: {statistics.median(times['HTTP']) - statistics.median(times['gRPC']):.2f} ms")


async def measure_streams(model: str, address: str, url: str, streams: int, tokens: int, rounds: int) -> None:
    """The gateway's processor time for each token, while it sends this many streams at once."""
    sampling = inference_pb2.SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    request = inference_pb2.GenerateRequest(model=model, prompt=common_pb2.Prompt(text=PROMPT), sampling=sampling)
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    limits = httpx2.Limits(max_connections=streams)
    async with (
        grpc.aio.insecure_channel(address) as channel,
        httpx2.AsyncClient(base_url=url, limits=limits, timeout=600) as http,
    ):
        stub = InferenceServiceStub(channel)

        async def by_grpc() -> None:
            async for _ in stub.Generate(request):
                pass

        async def by_http() -> None:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_raw():
                    pass

        async def processor_seconds() -> float:
            found = re.search(r"^process_cpu_seconds_total (\S+)", (await http.get("/metrics")).text, re.MULTILINE)
            return float(found[1]) if found else 0.0

        costs: dict[str, list[float]] = {"gRPC": [], "HTTP": []}
        for number in range(-1, rounds):
            for name, call in (("gRPC", by_grpc), ("HTTP", by_http)):
                start = await processor_seconds()
                await asyncio.gather(*(call() for _ in range(streams)))
                spent = await processor_seconds() - start
                if number >= 0:
                    costs[name].append(spent / (streams * tokens) * 1e6)
    for name, found in costs.items():
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"{name}, {streams} streams: {statistics.median(found):.1f} us a token, {spread}")
    print(f"HTTP by gRPC: {statistics.median(costs['HTTP']) / statistics.median(costs['gRPC']):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--http", default="http://127.0.0.1:8000")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    asyncio.run(measure(given.model, given.address, given.http, given.calls))
    asyncio.run(measure_streams(given.model, given.address, given.http, given.streams, given.tokens, given.rounds))


if __name__ == "__main__":
    main()
