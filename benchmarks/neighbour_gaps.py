"""The largest gap between two tokens of a stream while other clients send large, slow or many requests.

Uses `attn serve` as in `overload.py`. The other clients run in a process of their own, so that their own work causes no
gaps in the reader. Each disturbance is compared with an idle control measured just before it.

    python benchmarks/neighbour_gaps.py --out benchmarks/results/neighbour-gaps.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_gateway.standstills import freeze_gc_heap
from overload import request, server
from report import write_report

GAP_MS = 100.0
"""The largest increase of the gap that a disturbance may cause, in milliseconds."""
SIZE = {"hidden_size": 192, "num_layers": 6, "num_heads": 6, "max_seq_len": 1024}


async def largest_gap(stub: InferenceServiceStub, disturb: Callable[[], Awaitable[Any]] | None) -> float:
    """The longest time between two messages of a stream, in milliseconds, with `disturb` started after 20 tokens."""
    last, worst, tokens, beside = 0.0, 0.0, 0, None
    async for message in stub.Generate(request("hello", new=900)):
        now = time.perf_counter()
        worst, last = max(worst, now - last if last else 0.0), now
        tokens += len(message.tokens)
        if tokens == 20 and disturb is not None:
            beside = asyncio.ensure_future(asyncio.wait_for(disturb(), 60))
    if beside is not None:
        await asyncio.gather(beside, return_exceptions=True)
    return 1000 * worst


@contextlib.asynccontextmanager
async def others(name: str, address: str) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """Start a process of other clients; yields a function that triggers its disturbance and waits for its end."""
    words = [sys.executable, __file__, "--disturb", name, "--address", address]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    await process.stdout.readline()  # type: ignore[union-attr]

    async def disturb() -> None:
        await process.communicate(b"go\n")

    try:
        yield disturb
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def disturb_when_told(name: str, address: str) -> None:
    """The main function of the other clients' process: wait for a line on standard input, then disturb."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await disturbances(address)[name]()


async def ended(call: Any) -> str:
    """Read a call to its end; returns its status code."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as failure:
        return failure.code().name
    return "OK"


def disturbances(address: str) -> dict[str, Callable[[], Awaitable[Any]]]:
    """The disturbances by name, each over a connection of its own."""
    properties = {
        f"property{i}": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{3,20}$"}}}
        for i in range(1530)
    }
    schema = json.dumps({"type": "object", "properties": properties})
    said = common_pb2.Chat(messages=[common_pb2.ChatMessage(role="user", content="hi")])
    chat = inference_pb2.GenerateRequest(model="m", prompt=common_pb2.Prompt(chat=said))

    async def send(requests: list[Any]) -> list[str]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = InferenceServiceStub(channel)
            return list(await asyncio.gather(*(ended(stub.Generate(each)) for each in requests)))

    async def unread() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [InferenceServiceStub(channel).Generate(request("hi", new=200)) for _ in range(32)]
            await asyncio.sleep(4)
            for call in calls:
                call.cancel()

    structured = inference_pb2.StructuredOutput(json_schema=schema)
    return {
        "a prompt of 4 MB": lambda: send([request("a" * (4 * 2**20 - 200))]),
        "a schema of 160 kB": lambda: send([request("hi", ignore_eos=False, structured_output=structured)]),
        "a template that loops": lambda: send([chat] * 4),
        "1,000 tiny streams": lambda: send([request("a", new=1)] * 1000),
        "32 readers that do not read": unread,
    }


async def measure() -> list[dict[str, Any]]:
    """The largest gap with each disturbance, and in its idle control."""
    rows = []
    async with server(SIZE) as running, grpc.aio.insecure_channel(running.address) as channel:
        stub = InferenceServiceStub(channel)
        for name in disturbances(running.address):
            async with others(name, running.address) as disturb:
                idle, disturbed = await largest_gap(stub, None), await largest_gap(stub, disturb)
            load = round(os.getloadavg()[0], 1)
            rows.append({"others": name, "idle [ms]": round(idle, 1), "gap [ms]": round(disturbed, 1), "load": load})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Run the benchmark and print the results; returns 1 if a limit is exceeded, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, help="where to write the figures; by default among the results")
    parser.add_argument("--disturb", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.disturb:
        asyncio.run(disturb_when_told(asked.disturb, asked.address))
        return 0
    freeze_gc_heap()  # the reader's own pauses would count as gaps
    rows = asyncio.run(measure())
    write_report("neighbour-gaps", {"question": "what do others cost a stream?", "model": SIZE}, rows, asked.out)
    return int(any(row["gap [ms]"] > row["idle [ms]"] + GAP_MS for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
