"""Load generator for serving benchmarks: requests at a given rate, their latencies, and a report in vLLM's format.

Times of a request: TTFT (time to first token), TPOT (time per output token after the first), ITL (inter-token latency:
between two messages of tokens) and E2EL (end to end), all in seconds here and in milliseconds in reports.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from attn_core.errors import AttnError, InvalidValue, MissingPackage, Unavailable
from attn_schema import SamplingParams

if TYPE_CHECKING:
    from attn_client import ClientSettings

WORDS = tuple(
    "time year people way day man thing woman life child world school state family student group country problem hand "  # noqa: SIM905
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service".split()
)
"""Common words, each a single token in most vocabularies."""
METRICS = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
           "itl": "Inter-token Latency", "e2el": "End-to-end Latency"}  # fmt: skip
WIDTH = 50


@dataclass(frozen=True)
class LoadRequest:
    """One request: its prompt and the number of tokens to generate."""

    prompt: str
    output_len: int


@dataclass
class RequestTimes:
    """The measured times of a request, in seconds; `itl` are the times between two messages with tokens."""

    start: float = 0.0
    ttft: float | None = None
    itl: list[float] = field(default_factory=list)
    e2el: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    def arrived(self) -> None:
        """Record the time at which tokens arrived."""
        now = time.perf_counter() - self.start
        if self.ttft is None:
            self.ttft = now
        else:
            self.itl.append(now - self.e2el)
        self.e2el = now

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)


class Backend(Protocol):
    """The server that is measured."""

    async def __call__(self, request: LoadRequest, times: RequestTimes) -> None:
        """Send the request and record its times; raises the error of a request that fails."""
        ...


class AttnBackend(AbstractAsyncContextManager["AttnBackend"]):
    """An attn server over gRPC."""

    def __init__(self, settings: ClientSettings, model: str, *, ignore_eos: bool) -> None:
        from attn_client import AsyncClient

        self._client = AsyncClient(settings)
        self._model = model
        self._ignore_eos = ignore_eos

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def __call__(self, request: LoadRequest, times: RequestTimes) -> None:
        """Send one request and record its times."""
        sampling = SamplingParams(temperature=0, max_new_tokens=request.output_len, ignore_eos=self._ignore_eos)
        async with aclosing(self._client.generate(self._model, request.prompt, sampling)) as deltas:
            async for delta in deltas:
                if delta.tokens:
                    times.arrived()
                if delta.usage is not None:
                    times.prompt_tokens = delta.usage.prompt_tokens
                    times.output_tokens = delta.usage.completion_tokens


class OpenAIBackend(AbstractAsyncContextManager["OpenAIBackend"]):
    """Any server with OpenAI's HTTP API; `chat` uses /v1/chat/completions instead of /v1/completions."""

    def __init__(self, base_url: str, model: str, *, chat: bool, ignore_eos: bool, token: str | None) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise MissingPackage.of("attn-cli[bench]", "a benchmark over HTTP") from error
        headers = {"authorization": f"Bearer {token}"} if token else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=None, limits=limits)
        self._failure = httpx2.HTTPError
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat = chat
        # Servers that do not support the field reject it, so it is sent only if requested.
        self._body: dict[str, Any] = {"model": model, "stream": True, "temperature": 0.0}
        self._body |= {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if ignore_eos else {})

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def __call__(self, request: LoadRequest, times: RequestTimes) -> None:
        """Send one request and record its times."""
        said = {"messages": [{"role": "user", "content": request.prompt}]} if self._chat else {"prompt": request.prompt}
        body = {**self._body, **said, "max_tokens": request.output_len}
        try:
            await self._stream(body, times)
        except self._failure as error:
            raise Unavailable(f"{self._http.base_url}: {str(error) or type(error).__name__}") from error

    async def _stream(self, body: dict[str, Any], times: RequestTimes) -> None:
        async with self._http.stream("POST", self._path, json=body) as answer:
            if answer.status_code != 200:
                raise InvalidValue(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:500]}")
            async for line in answer.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    self._read(json.loads(data), times)

    def _read(self, chunk: Mapping[str, Any], times: RequestTimes) -> None:
        if "error" in chunk:
            raise InvalidValue(str(chunk["error"]))
        for choice in chunk.get("choices", ()):
            if (choice.get("delta") or {}).get("content") if self._chat else choice.get("text"):
                times.arrived()
        if chunk.get("usage"):
            times.prompt_tokens = chunk["usage"]["prompt_tokens"]
            times.output_tokens = chunk["usage"]["completion_tokens"]


def random_requests(
    count: int, input_len: int, output_len: int, *, range_ratio: float = 0.0, seed: int = 0
) -> list[LoadRequest]:
    """Requests with prompts of random words.

    Input and output lengths are drawn uniformly from `len * (1 - range_ratio)` to `len * (1 + range_ratio)`.
    """
    draw = random.Random(seed)

    def length(middle: int) -> int:
        return max(1, draw.randint(math.floor(middle * (1 - range_ratio)), math.ceil(middle * (1 + range_ratio))))

    return [LoadRequest(" ".join(draw.choices(WORDS, k=length(input_len))), length(output_len)) for _ in range(count)]


async def arrivals(count: int, rate: float, burstiness: float, seed: int) -> AsyncIterator[int]:
    """Yield the request numbers 0 to `count` - 1, each at the time at which the request is to be sent.

    `rate` is in requests per second; an infinite rate sends all at once. The intervals have a gamma distribution of
    shape `burstiness`; 1 is a Poisson process.
    """
    draw = random.Random(seed)
    for number in range(count):
        if number and math.isfinite(rate):
            await asyncio.sleep(draw.gammavariate(burstiness, 1 / (rate * burstiness)))
        yield number


async def run_requests(
    backend: Backend,
    requests: Sequence[LoadRequest],
    sent: AsyncIterator[int],
    *,
    max_concurrency: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> tuple[list[RequestTimes], float]:
    """Send each request when `sent` yields its number; returns the times of all requests, and the total seconds."""
    gate = asyncio.Semaphore(max_concurrency or max(1, len(requests)))
    found = [RequestTimes() for _ in requests]

    async def one(number: int) -> None:
        async with gate:
            times = found[number]
            times.start = time.perf_counter()
            try:
                await backend(requests[number], times)
            except (AttnError, OSError, ValueError) as error:
                times.error = f"{type(error).__name__}: {error}"
            done()

    start = time.perf_counter()
    running = [asyncio.create_task(one(number)) async for number in sent]
    await asyncio.gather(*running)
    return found, time.perf_counter() - start


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile with linear interpolation, as in numpy; 0 if there are no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def good(times: RequestTimes, goals: Mapping[str, float]) -> bool:
    """Whether a request succeeded within all goals (upper bounds in milliseconds, by metric)."""
    spent = {"ttft": times.ttft, "tpot": times.tpot, "e2el": times.e2el}
    return not times.error and all((spent[name] or 0.0) * 1000 <= goal for name, goal in goals.items())


def summary(
    found: Sequence[RequestTimes], seconds: float, percentiles: Sequence[float], goals: Mapping[str, float]
) -> dict[str, Any]:
    """The throughput and latency figures of a run, under the names that vLLM uses; times in milliseconds."""
    whole = [times for times in found if not times.error]
    inputs, outputs = sum(times.prompt_tokens for times in whole), sum(times.output_tokens for times in whole)
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(whole),
        "failed": len(found) - len(whole),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(whole) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    if goals:
        figures["request_goodput"] = sum(good(times, goals) for times in found) / seconds
    values = {
        "ttft": [times.ttft for times in whole if times.ttft is not None],
        "tpot": [times.tpot for times in whole if times.tpot is not None],
        "itl": [spent for times in whole for spent in times.itl],
        "e2el": [times.e2el for times in whole],
    }
    for name, spent in values.items():
        milliseconds = [value * 1000 for value in spent]
        figures[f"mean_{name}_ms"] = sum(milliseconds) / len(milliseconds) if milliseconds else 0.0
        figures[f"median_{name}_ms"] = percentile(milliseconds, 50)
        for percent in percentiles:
            figures[f"p{percent:g}_{name}_ms"] = percentile(milliseconds, percent)
    return figures


LINES = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "total_token_throughput": "Total Token throughput (tok/s):",
}


def report(figures: Mapping[str, Any], shown: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures as text, in the layout of vLLM's report."""

    def line(label: str, value: float) -> str:
        return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"

    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [line(label, figures[name]) for name, label in LINES.items() if name in figures]
    for name in shown:
        lines.append(f"{METRICS[name]:-^{WIDTH}}")
        lines.append(line(f"Mean {name.upper()} (ms):", figures[f"mean_{name}_ms"]))
        lines.append(line(f"Median {name.upper()} (ms):", figures[f"median_{name}_ms"]))
        lines += [line(f"P{p:g} {name.upper()} (ms):", figures[f"p{p:g}_{name}_ms"]) for p in percentiles]
    return "\n".join([*(text.rstrip() for text in lines), "=" * WIDTH])
