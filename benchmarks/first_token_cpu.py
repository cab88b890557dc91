"""How long does a first token take while streams run, and where is the time spent?

    python benchmarks/first_token_cpu.py MODEL_FOLDER --threads 1

A prompt that arrives is computed as a whole in the next step, together with the next token of each stream. For every
prompt length, three kinds of steps are measured: a decode step of the streams, a step with the prompt and the streams,
and a step with the prompt alone, the minimum for any scheduling. "steps" are the times divided by that of the decode
step; the step with the prompt is divided into blocks, unembedding with token search, and the rest. The kinds take
turns, so that other load affects all equally; milliseconds are processor time per thread, and wall-clock time.

Then prompts arrive at an engine's thread asynchronously: measured are the wall-clock time from `submit` to the first
token, which includes the rest of the running step, and the streams' gaps between tokens with and without such prompts.
The result, with the machine and its load before and after, is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attn_engine import Engine, EngineLoop, Request, RequestOutput, SamplingParams
from attn_models.loading import LoadedModel
from engine_measures import engine_of, load_form, long_ids, submit
from report import write_report

PROMPTS = (16, 64, 128, 512)
DECODES = 3
"""The number of decode steps for each step with a prompt."""
CONTEXT = 20
"""The prompt length of the first stream, in tokens; each further stream has one more."""
NEW = 400
"""The new tokens of a stream: enough for it to outlast the measurement."""


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="model folder in the Hugging Face layout")
    p.add_argument("--forms", nargs="+", default=["weights=auto", "weights=int8"])
    p.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS))
    p.add_argument("--streams", type=int, default=16)
    p.add_argument("--cache", default="shared")
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--arrivals", type=int, default=12, help="prompts of each length that arrive at a thread; 0: none")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    return p.parse_args()


class Watch:
    """Records milliseconds of processor time per thread and of wall-clock time, by kind of step."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.busy: dict[str, list[float]] = {}
        self.clock: dict[str, list[float]] = {}

    def take(self, kind: str, call: Callable[[], object]) -> None:
        """Call a function and record its times."""
        busy, clock = time.process_time(), time.perf_counter()
        call()
        self.busy.setdefault(kind, []).append((time.process_time() - busy) * 1e3 / self._threads)
        self.clock.setdefault(kind, []).append((time.perf_counter() - clock) * 1e3)

    def medians(self, kind: str) -> tuple[float, float]:
        """The medians of processor time and of wall-clock time."""
        return statistics.median(self.busy[kind]), statistics.median(self.clock[kind])


def streaming(loaded: LoadedModel, cache: str, streams: int, more: int) -> Engine:
    """An engine with `streams` decoding streams and a cache of `more` tokens, with a free place for another request."""
    engine = engine_of(loaded, cache, streams + 1, more)
    for i in range(streams):
        submit(engine, f"stream {i}", ids_of(loaded, CONTEXT + i, i), NEW)
    while engine.stats().generated_tokens < streams:
        engine.step()
    return engine


def ids_of(loaded: LoadedModel, count: int, number: int) -> list[int]:
    """A prompt with a unique first token, so that the prefix cache is never hit."""
    return [1 + number % (loaded.model.vocab_size - 1), *long_ids(loaded, count)[1:]]


def room(args: argparse.Namespace, prompt: int) -> int:
    """The cache size, in tokens, for the streams and some prompts, with room for partially filled blocks."""
    return args.streams * (CONTEXT + args.streams + NEW + 32) + 4 * (prompt + 64)


def first_token_step(engine: Engine, loaded: LoadedModel, prompt: int, number: int) -> None:
    """Submit a prompt and run one step; exits if the step does not produce its first token."""
    submit(engine, f"new {number}", ids_of(loaded, prompt, 1000 + number), 1)
    if not any(event.request_id == f"new {number}" and event.delta.tokens for event in engine.step()):
        raise SystemExit(f"a prompt of {prompt} tokens was not computed in one step")


def steps(loaded: LoadedModel, args: argparse.Namespace, prompt: int) -> dict[str, Any]:
    """The milliseconds of each kind of step, and the ratios to a decode step."""
    watch, parts = Watch(args.threads), Parts(loaded.model)
    needed = room(args, prompt)
    beside, alone = streaming(loaded, args.cache, args.streams, needed), engine_of(loaded, args.cache, 1, needed)
    for number in range(args.repeats + 1):
        if number == 1:
            watch = Watch(args.threads)  # discard the warm-up steps
        for _ in range(DECODES):
            watch.take("decode", beside.step)
        with parts:
            watch.take("joined", lambda number=number: first_token_step(beside, loaded, prompt, number))
        watch.take("alone", lambda number=number: first_token_step(alone, loaded, prompt, number))
    decode, joined, only = (watch.medians(kind)[0] for kind in ("decode", "joined", "alone"))
    return {
        "prompt": prompt,
        "decode_step_ms": round(decode, 2),
        "first_token_step_ms": round(joined, 2),
        "prompt_alone_ms": round(only, 2),
        "steps": round(joined / decode, 2),
        "steps_alone": round(only / decode, 2),
        "percent_by_part": parts.percent(),
        "clock_ms": {kind: round(watch.medians(kind)[1], 2) for kind in ("decode", "joined", "alone")},
    }


class Parts:
    """Context that measures the shares of the model's blocks, its unembedding and the rest in the time of steps."""

    CALLS = ("step", "logits", "greedy_tokens")

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept = {name: getattr(model, name) for name in self.CALLS if hasattr(model, name)}
        self._took = dict.fromkeys(self._kept, 0.0)
        self._whole = self._since = 0.0

    def __enter__(self) -> None:
        for name, call in self._kept.items():
            setattr(self._model, name, self._timed(name, call))
        self._since = time.process_time()

    def __exit__(self, *exception: object) -> None:
        self._whole += time.process_time() - self._since
        for name in self._kept:
            delattr(self._model, name)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            start = time.process_time()
            answer = call(*given)
            self._took[name] += time.process_time() - start
            return answer

        return run

    def percent(self) -> dict[str, float]:
        """The percentage of the total time by part."""
        blocks, whole = self._took["step"], self._whole or 1.0
        head = sum(self._took.values()) - blocks
        shares = {"blocks": blocks, "unembedding": head, "the rest": whole - blocks - head}
        return {name: round(100 * seconds / whole, 1) for name, seconds in shares.items()}


class Stream:
    """Records the gaps between the tokens of streams, in wall-clock milliseconds."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self.gaps: list[float] = []

    def deliver(self, output: RequestOutput) -> None:
        """Record the gap before the tokens of an output."""
        now, last = time.perf_counter(), self._last.get(output.request_id)
        if output.delta.tokens:
            self._last[output.request_id] = now
            if last is not None:
                self.gaps.append((now - last) * 1e3)

    def summary(self, since: int) -> dict[str, float]:
        """Median, 99th percentile and largest of the gaps after the first `since`, in milliseconds."""
        gaps = sorted(self.gaps[since:])
        high = gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))]
        return {"median": round(statistics.median(gaps), 2), "p99": round(high, 2), "largest": round(gaps[-1], 2)}


def arrivals(loaded: LoadedModel, args: argparse.Namespace, prompt: int) -> dict[str, Any]:
    """Measure prompts that arrive at an engine's thread while streams run, one at a time, at random times."""
    draw, stream, times = random.Random(prompt), Stream(), list[float]()
    engine = engine_of(loaded, args.cache, args.streams + 1, room(args, prompt))
    with EngineLoop(engine) as loop:
        for i in range(args.streams):
            loop.submit(request(f"stream {i}", ids_of(loaded, CONTEXT + i, i), NEW), stream.deliver)
        quiet = _wait(stream, 10 * args.streams)
        _wait(stream, quiet + 4 * args.arrivals * args.streams)
        alone = stream.summary(quiet)
        since = len(stream.gaps)
        for number in range(args.arrivals):
            time.sleep(draw.uniform(2.0, 4.0) * alone["median"] / 1e3)
            came: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
            start = time.perf_counter()
            loop.submit(request(f"new {number}", ids_of(loaded, prompt, 1000 + number), 1), came.put)
            came.get()
            times.append((time.perf_counter() - start) * 1e3)
        if loop.stats().running < args.streams:
            raise SystemExit(f"streams ended after {NEW} tokens, too early; ask for fewer arrivals")
        beside = stream.summary(since)
    return {
        "prompt": prompt,
        "first_token_ms": round(statistics.median(times), 2),
        "first_token_steps": round(statistics.median(times) / alone["median"], 2),
        "gaps_ms": alone,
        "gaps_ms_with_prompts": beside,
    }


def request(name: str, ids: list[int], new: int) -> Request:
    return Request(id=name, token_ids=tuple(ids), params=SamplingParams(max_new_tokens=new, ignore_eos=True))


def _wait(stream: Stream, count: int) -> int:
    """Wait until at least `count` gaps have been recorded; returns their number."""
    while len(stream.gaps) < count:
        time.sleep(0.001)
    return len(stream.gaps)


def rounds(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for form in args.forms:
        loaded, _ = load_form(args, form)
        facts = {"form": form, "streams": args.streams}
        for prompt in args.prompts:
            yield facts | steps(loaded, args, prompt)
        for prompt in args.prompts if args.arrivals else ():
            yield facts | arrivals(loaded, args, prompt)


def main() -> None:
    args = arguments()
    facts = {"question": "time to a first token under running streams, in decode steps", "threads": args.threads}
    write_report("first_token_cpu", facts, rounds(args), args.out)


if __name__ == "__main__":
    main()
