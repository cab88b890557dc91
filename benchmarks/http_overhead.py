"""The overhead of HTTP over gRPC: the same one-token completions by both, in turns, from a running server.

    attn serve --model smollm2-135m-instruct --http-port 8000
    python benchmarks/http_overhead.py --model smollm2-135m-instruct --http http://127.0.0.1:8000

Prints the median and 90th percentile of each in milliseconds, and the difference of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--http", default="http://127.0.0.1:8000")
    parser.add_argument("--calls", type=int, default=200)
    given = parser.parse_args()
    asyncio.run(measure(given.model, given.address, given.http, given.calls))


if __name__ == "__main__":
    main()
