"""A server under overload: the goodput at 0.5 to 10 times its capacity.

`attn serve` with a random model over loopback, and one process that sends requests at random times (Poisson),
regardless of the server's responses. Goodput is the tokens per second of completions that finished before their
deadline. Loads are multiples of the capacity, which is measured again in every round, as it varies with the machine.

    python benchmarks/overload.py --out benchmarks/results/overload.json        three minutes
    python benchmarks/overload.py --short                                       a minute: 1 and 5 times, one round
    python benchmarks/overload.py --short --deadline 20                         long deadlines: two minutes
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import torch
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import DecoderConfig
from report import write_report

LOADS = (0.5, 1.0, 2.0, 5.0, 10.0)
LETTERS = "abcdefghijklmnopqrstuvwxyz "
PROMPT, NEW = 24, 24
"""The number of tokens of each prompt and of each completion."""
DEADLINE = 2.0
"""The seconds that a request may take, unless others are asked for."""
REFUSAL = 0.1
"""Seconds within which 95 of 100 refusals at five times the capacity have to come."""
RUNNING = 16
"""The number of requests that the server runs at a time."""
GOODPUT = 0.9
"""The minimum goodput at five times the capacity, as a fraction of that at the capacity."""
SIZE = {"hidden_size": 256, "num_layers": 8, "num_heads": 8, "max_seq_len": 1024}
LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}"


@dataclasses.dataclass
class Server:
    """A running server: its address and main process."""

    address: str
    process: psutil.Process

    def seconds(self) -> dict[str, float]:
        """The processor seconds so far of the gateway, of the engine, and of Ray's own processes in total."""
        found: Counter[str] = Counter()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self.process, *self.process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    title = " ".join(process.cmdline())
                    name = "gateway" if process == self.process else "engine" if "engine_server" in title else "ray"
                    found[name] += sum(process.cpu_times()[:2])
        return dict(found)


@contextlib.asynccontextmanager
async def server(size: dict[str, int], *words: str) -> AsyncIterator[Server]:
    """Run `attn serve` with one thread and a random model of this size, whose chat template loops endlessly."""
    limits = ("--max-num-seqs", str(RUNNING), "--max-num-batched-tokens", "64")
    with tempfile.TemporaryDirectory() as home:
        save(Path(home) / "models" / "m", size)
        async with serving(Path(home), *limits, *words) as running:
            yield running


@contextlib.asynccontextmanager
async def serving(home: Path, *words: str) -> AsyncIterator[Server]:
    """Run `attn serve` with the model `m` in the folder `home`, and one thread for each engine."""
    ready = home / f"ready-{time.monotonic_ns()}.json"
    asked = ["serve", "--model", "m", "--home", str(home), "--port", "0", "--ready-file", str(ready)]
    asked += ["--num-threads", "1", "--log-level", "warning", *words]
    process = await asyncio.create_subprocess_exec(Path(sys.executable).with_name("attn"), *asked)
    try:
        while not ready.exists():
            await asyncio.sleep(0.2)
            if process.returncode is not None:
                raise SystemExit("attn serve has ended")
        yield Server(json.loads(ready.read_text())["address"], psutil.Process(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


def save(folder: Path, size: dict[str, int]) -> None:
    """Save a character-level decoder with random weights."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz {}[]:,.?0123456789" + chr(34))
    tokenizer.settings = dataclasses.replace(tokenizer.settings, chat_template=LOOP)
    config = DecoderConfig(vocab_size=tokenizer.vocab_size, mechanism="mha", **size)
    save_model(folder, Decoder(config), tokenizer)


def request(text: str, new: int = NEW, **sampling: Any) -> inference_pb2.GenerateRequest:
    """A request for exactly `new` tokens, unless the sampling parameters say otherwise."""
    params = inference_pb2.SamplingParams(max_new_tokens=new, **{"ignore_eos": True, **sampling})
    return inference_pb2.GenerateRequest(model="m", prompt=common_pb2.Prompt(text=text), sampling=params)


@dataclasses.dataclass
class Answer:
    """The outcome of a request: its status code, number of tokens and seconds."""

    code: str
    tokens: int
    seconds: float


async def answer(stub: InferenceServiceStub, text: str, deadline: float | None) -> Answer:
    """Send a request and read its response to the end."""
    tokens, begun, code = 0, time.monotonic(), "OK"
    try:
        async for message in stub.Generate(request(text), timeout=deadline):
            tokens += len(message.tokens)
    except grpc.aio.AioRpcError as failure:
        code = failure.code().name
    return Answer(code, tokens, time.monotonic() - begun)


def prompts(seed: int) -> Iterator[str]:
    """An endless iterator of prompts of random letters."""
    rng = random.Random(seed)
    while True:
        yield "".join(rng.choices(LETTERS, k=PROMPT))


async def capacity(stub: InferenceServiceStub, seconds: float) -> float:
    """The requests per second that the server completes while 1.5 times as many as it runs at a time are open."""
    texts, done, begun = prompts(1), 0, time.monotonic()

    async def work() -> None:
        nonlocal done
        while time.monotonic() < begun + seconds:
            whole = (await answer(stub, next(texts), None)).code == "OK"
            done += whole

    await asyncio.gather(*(work() for _ in range(RUNNING * 3 // 2)))
    return done / (time.monotonic() - begun)


async def arrivals(
    stub: InferenceServiceStub, rate: float, seconds: float, deadline: float
) -> tuple[list[Answer], float]:
    """Send requests at random times, `rate` per second; returns their outcomes and the largest delay in sending one."""
    rng, texts, running = random.Random(2), prompts(3), []
    begun = at = time.monotonic()
    late = 0.0
    while (at := at + rng.expovariate(rate)) < begun + seconds:
        wait = at - time.monotonic()
        late = max(late, -wait)
        await asyncio.sleep(max(0.0, wait))
        running.append(asyncio.ensure_future(answer(stub, next(texts), deadline)))
    return await asyncio.gather(*running), late


async def generated(stub: InferenceServiceStub) -> int:
    """The number of tokens that the engine has generated so far."""
    return (await stub.GetEngineStats(inference_pb2.GetEngineStatsRequest(model="m"))).generated_tokens


async def at_load(
    server: Server, stub: InferenceServiceStub, rate: float, seconds: float, deadline: float = DEADLINE
) -> dict[str, Any]:
    """The measurements at one load."""
    used, own, tokens, begun = server.seconds(), time.process_time(), await generated(stub), time.monotonic()
    answers, late = await arrivals(stub, rate, seconds, deadline)
    spent = time.monotonic() - begun
    computed = await generated(stub) - tokens
    codes = Counter(each.code for each in answers)
    good = sum(each.tokens for each in answers if each.code == "OK")
    refused = sorted(each.seconds for each in answers if each.code == "RESOURCE_EXHAUSTED")
    cores = {name: (now - used.get(name, 0.0)) / spent for name, now in server.seconds().items()}
    return {
        "requests a second": rate,
        "goodput [tokens/s]": good / spent,
        "requests": len(answers),
        "in time": codes["OK"],
        "refused": codes["RESOURCE_EXHAUSTED"],
        "too late": codes["DEADLINE_EXCEEDED"],
        "other ends": codes.total() - codes["OK"] - codes["RESOURCE_EXHAUSTED"] - codes["DEADLINE_EXCEEDED"],
        "computed for nobody": 1 - good / computed if computed else 0.0,
        "refusal, median [s]": statistics.median(refused) if refused else None,
        "refusal, 95 of 100 [s]": refused[int(0.95 * len(refused))] if refused else None,
        "refusal, latest [s]": refused[-1] if refused else None,
        "cores": {**cores, "client": (time.process_time() - own) / spent},
        "sent late by at most [s]": late,
        "machine load": os.getloadavg()[0],
    }


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures rounded to three significant digits."""
    shown = {}
    for name, figure in figures.items():
        inner = rounded(figure) if isinstance(figure, dict) else figure
        shown[name] = float(f"{figure:.3g}") if isinstance(figure, float) else inner
    return shown


async def measure(
    loads: tuple[float, ...], rounds: int, seconds: float, deadline: float = DEADLINE
) -> list[dict[str, Any]]:
    """The measurements at each load in each round."""
    rows = []
    async with server(SIZE) as running, grpc.aio.insecure_channel(running.address) as channel:
        stub = InferenceServiceStub(channel)
        await capacity(stub, 2.0)
        for number in range(rounds):
            rate = await capacity(stub, min(seconds / 2, 10.0))
            for load in loads:
                figures = await at_load(running, stub, load * rate, seconds, deadline)
                rows.append({"round": number, "load": load, **rounded(figures)})
                print(json.dumps(rows[-1]), flush=True)
                await asyncio.sleep(deadline / 4)
    return rows


def summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row for each load: medians over the rounds, and the goodput relative to that at the capacity by round."""
    once = {row["round"]: row["goodput [tokens/s]"] for row in rows if row["load"] == 1.0}
    for load in dict.fromkeys(row["load"] for row in rows):
        of_load = [row for row in rows if row["load"] == load]
        kept = [row["goodput [tokens/s]"] / max(once[row["round"]], 1e-9) for row in of_load]
        yield {
            "load": load,
            "of the goodput at 1": round(statistics.median(kept), 3),
            "in each round": [round(part, 3) for part in kept],
            "computed for nobody": statistics.median(row["computed for nobody"] for row in of_load),
        }


def main() -> int:
    """Run the benchmark and print the results; returns 1 if a limit is violated, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--short", action="store_true", help="1 and 5 times the load, once")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="the seconds that each request may take")
    parser.add_argument("--out", type=Path, help="where to write the figures; by default among the results")
    asked = parser.parse_args()
    seconds, deadline = max(10.0, 2 * asked.deadline), asked.deadline
    short = measure((1.0, 5.0), 1, seconds, deadline)
    rows = asyncio.run(short) if asked.short else asyncio.run(measure(LOADS, 2, max(8.0, seconds), deadline))
    found = list(summary(rows))
    facts = {"question": "what is left of the goodput under overload?", "model": SIZE, "deadline [s]": deadline}
    if asked.short:
        print(json.dumps(found, indent=1))
    else:
        write_report("overload", {**facts, "summary": found}, rows, asked.out)
    late = max(row["refusal, 95 of 100 [s]"] or 0.0 for row in rows if row["load"] == 5.0)
    return int(late > REFUSAL or next(row for row in found if row["load"] == 5.0)["of the goodput at 1"] < GOODPUT)


if __name__ == "__main__":
    raise SystemExit(main())
