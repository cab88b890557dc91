"""Requests of every kind, what they must return, and what happens to them while replicas are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from attn_engine.client import EngineClient, TextTask
from attn_schema import Prompt, SamplingParams, ScoringParams, StructuredOutput

AT_ONCE = ("beams", "scores")
"""Kinds that return nothing before their end, so that there are no gaps between their messages."""


def mixed_tasks(prompt: str = "To be or not to be") -> dict[str, TextTask]:
    """Requests of every kind, long enough to be caught in the middle."""
    long = SamplingParams(max_new_tokens=200, ignore_eos=True)
    sampled = long.replace(temperature=1.0, seed=5)
    kinds: dict[str, SamplingParams | ScoringParams] = {
        "greedy": long,
        "sampled": sampled,
        "penalties": long.replace(repetition_penalty=1.3, frequency_penalty=0.5),
        "several with log probabilities": sampled.replace(n=3, top_logprobs=2),
        "structured": sampled.replace(ignore_eos=False, structured_output=StructuredOutput(regex="[a-z ]{190}[.]")),
        "stop": sampled.replace(seed=9, stop=("qz", "zq")),
        "beams": SamplingParams(max_new_tokens=60, num_beams=3, n=2),
        "scores": ScoringParams(top_logprobs=1),
    }
    return {name: TextTask(prompt=Prompt(text=prompt), params=params) for name, params in kinds.items()}


@dataclass
class Outcome:
    """What a request returned, by completion, and how it came."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    resumptions: int = 0
    largest_gap: float = 0.0

    @property
    def said(self) -> tuple[dict[int, str], dict[int, list[int]]]:
        return self.texts, self.ids


async def outcome(engine: EngineClient, task: TextTask, begun: asyncio.Semaphore | None = None) -> Outcome:
    """The outcome of a request; `begun` counts first tokens."""
    found = Outcome()
    last = None
    async for delta in engine.generate(task):
        now = time.monotonic()
        if last is None and begun is not None:
            begun.release()
        found.largest_gap = max(found.largest_gap, now - (last or now))
        last = now
        found.texts[delta.index] = found.texts.get(delta.index, "") + delta.text
        found.ids.setdefault(delta.index, []).extend(token.id for token in delta.tokens)
        found.resumptions = delta.resumptions
    return found


@dataclass
class Report:
    """What happened to the requests of a run in which replicas were killed."""

    kills: int = 0
    requests: int = 0
    resumed: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    """Requests that were lost, or had tokens missing, twice or others, by kind."""
    gaps: list[float] = field(default_factory=list)
    """The largest gap between two messages of each request, in seconds."""
    resumed_gaps: list[float] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    """When each request of `gaps` began, in seconds of the run."""
    killed: list[float] = field(default_factory=list)
    """When replicas were killed, in seconds of the run."""

    def figures(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "requests": self.requests,
            "resumed": self.resumed,
            "lost, doubled or different": dict(self.bad),
            "gap p50 of all [s]": quantile(self.gaps, 0.5),
            "gap p95 of all [s]": quantile(self.gaps, 0.95),
            "gap p50 of resumed [s]": quantile(self.resumed_gaps, 0.5),
            "gap p95 of resumed [s]": quantile(self.resumed_gaps, 0.95),
            "gap largest [s]": quantile(self.gaps, 1.0),
        }


def quantile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3) if ordered else None


async def chaos(engine: EngineClient, seconds: float, *, streams: int, kill_every: float, seed: int = 0) -> Report:
    """Keep so many streams running, and kill a replica every so many seconds; every outcome is compared."""
    tasks = mixed_tasks()
    wanted = {name: (await outcome(engine, task)).said for name, task in tasks.items()}
    report, rng = Report(), random.Random(seed)
    began = time.monotonic()
    left = iter(lambda: time.monotonic() - began < seconds, False)

    async def ask(names: list[str]) -> None:
        for _ in left:
            name = rng.choice(names)
            at = time.monotonic() - began
            try:
                found = await outcome(engine, mixed_tasks()[name])
            except Exception as error:  # noqa: BLE001 - whatever it is, the request is lost
                report.bad[f"{name}: {type(error).__name__}"] += 1
                continue
            report.requests += 1
            report.resumed += found.resumptions > 0
            if found.said != wanted[name]:
                report.bad[f"{name}: other tokens"] += 1
            if name not in AT_ONCE:
                report.gaps.append(found.largest_gap)
                report.begun.append(at)
                if found.resumptions:
                    report.resumed_gaps.append(found.largest_gap)

    async def kill() -> None:
        while True:
            await asyncio.sleep(kill_every)
            pids = await engine.pids()
            if len(pids) > 1:  # a spare replica goes on
                os.kill(rng.choice(pids), signal.SIGKILL)
                report.kills += 1
                report.killed.append(time.monotonic() - began)

    killer = asyncio.create_task(kill())
    await asyncio.gather(*(ask(list(tasks)) for _ in range(streams)))
    killer.cancel()
    return report
