"""A soak test of a server under mixed load with faults: finds growing memory and leaked resources.

`attn serve` with two models, and a process that sends the requests of `fuzz_requests.py`: valid and malformed requests,
cancellations at any time, streams left open. In every round another model is loaded and unloaded, and in some rounds
the engine is killed. After each round the server must become idle: no request, no token in the KV cache, and the same
number of processes as before.

    python benchmarks/soak.py --minutes 60 --out benchmarks/results/soak.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
from attn.v1 import inference_pb2, model_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn.v1.model_pb2_grpc import ModelServiceStub
from overload import Server, request, server
from report import write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "services" / "attn-serve" / "tests"))

from fuzzing import fuzz

SIZE = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_seq_len": 256}
TOGETHER = 64
REQUESTS = 400
"""The number of requests in a round."""
KILL_EVERY = 5
"""The number of rounds between two kills of the engine."""
REST_SECONDS = 120.0
GROWTH = 1.1
"""The maximum ratio of memory in the last quarter to that in the second quarter, as medians over rounds."""


def engines_of(running: Server) -> list[psutil.Process]:
    """The engine processes of a server."""
    found = []
    for child in running.process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "engine_server" in " ".join(child.cmdline()):
                found.append(child)
    return found


def held(process: psutil.Process) -> dict[str, float]:
    """The resources of a process: memory in MiB, open files and sockets, threads."""
    memory = process.memory_full_info().uss / 2**20
    return {"MiB": round(memory, 1), "files": process.num_fds(), "threads": process.num_threads()}


async def at_rest(running: Server, stub: InferenceServiceStub) -> bool:
    """Whether exactly one engine remains and becomes idle within `REST_SECONDS`."""
    until = time.monotonic() + REST_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(grpc.aio.AioRpcError):
            load = await stub.GetEngineStats(inference_pb2.GetEngineStatsRequest(model="m"))
            if not (load.running or load.waiting or load.kv_tokens_used) and len(engines_of(running)) == 1:
                return True
        await asyncio.sleep(0.2)
    return False


async def killed_under_streams(running: Server, stub: InferenceServiceStub) -> int:
    """Kill the engine while eight streams run; returns the number of streams that were lost."""

    async def stream() -> int:
        call = stub.Generate(request("abc", new=200))
        with contextlib.suppress(grpc.aio.AioRpcError):
            return sum([len(message.tokens) async for message in call])
        return 0

    streams = [asyncio.ensure_future(stream()) for _ in range(8)]
    await asyncio.sleep(0.5)
    engines_of(running)[0].kill()
    return sum(tokens != 200 for tokens in await asyncio.gather(*streams))


async def one_round(number: int, running: Server, channel: grpc.aio.Channel) -> dict[str, Any]:
    """Run one round of load and faults until the server is idle; returns the measurements."""
    stub, models = InferenceServiceStub(channel), ModelServiceStub(channel)
    await models.LoadModel(model_pb2.LoadModelRequest(name="other", source="m"))
    ended, faults = await fuzz(channel, number * REQUESTS, REQUESTS, TOGETHER, ("m", "other"))
    await models.UnloadModel(model_pb2.UnloadModelRequest(name="other", shutdown_timeout=5))
    lost = await killed_under_streams(running, stub) if number % KILL_EVERY == KILL_EVERY - 1 else 0
    rested = await at_rest(running, stub)
    engine = engines_of(running)[0]
    return {
        "round": number,
        "ended": dict(ended),
        "faults": [fault[:600] for fault in faults],
        "streams lost": lost,
        "at rest": rested,
        "gateway": held(running.process) | {"processes": len(running.process.children(recursive=True))},
        "engine": held(engine),
        "engine's process": engine.pid,
    }


async def measure(minutes: float) -> list[dict[str, Any]]:
    """Run rounds until the time is over; returns their measurements."""
    rows: list[dict[str, Any]] = []
    async with server(SIZE) as running:
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            async with grpc.aio.insecure_channel(running.address) as channel:
                row = await one_round(len(rows), running, channel)
            rows.append({"minute": round(minutes - (until - time.monotonic()) / 60, 2), **row})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The growth of resources from the second to the last quarter of the rounds, and the losses."""
    second, last = rows[len(rows) // 4 : len(rows) // 2], rows[3 * len(rows) // 4 :]
    ended: Counter[str] = Counter()
    for row in rows:
        ended.update(row["ended"])

    def of(part: list[dict[str, Any]], process: str, what: str) -> float:
        return statistics.median(row[process][what] for row in part)

    grown = {
        f"{process}, {what}": [of(second, process, what), of(last, process, what)]
        for process in ("gateway", "engine")
        for what in rows[-1][process]
    }
    return {
        "rounds": len(rows),
        "ended": dict(ended),
        "engines killed": len({row["engine's process"] for row in rows}) - 1,
        "streams lost": sum(row["streams lost"] for row in rows),
        "faults": [fault for row in rows for fault in row["faults"]],
        "rounds without rest": sum(not row["at rest"] for row in rows),
        "second quarter, last quarter": grown,
    }


def main() -> int:
    """Run the test and print the summary; returns 1 if a limit is violated, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="where to write the figures; by default among the results")
    asked = parser.parse_args()
    rows = asyncio.run(measure(asked.minutes))
    found = summary(rows)
    facts = {"question": "what grows under mixed load with faults?", "model": SIZE, "minutes": asked.minutes}
    write_report("soak", {**facts, "summary": found}, rows, asked.out)
    print(json.dumps(found, indent=1))
    bad = found["streams lost"] or found["faults"] or found["rounds without rest"]
    grown = any(after > GROWTH * before + 2 for before, after in found["second quarter, last quarter"].values())
    return int(bool(bad or grown))


if __name__ == "__main__":
    raise SystemExit(main())
