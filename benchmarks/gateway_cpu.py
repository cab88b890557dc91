"""The overhead of the gRPC server: 16 streams through `attn serve` and with an engine in process, and a unary call.

Both run the workload of `shared/peers` (greedy, 128 new tokens, short prompts) with the same threads, taking turns.

    python benchmarks/gateway_cpu.py MODEL_FOLDER --out benchmarks/results/gateway-cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attn_client import AsyncClient, ClientSettings
from attn_engine.client import EngineClient, TextTask
from attn_engine.in_process import InProcess
from attn_schema import EngineConfig, Prompt, SamplingParams

NEW_TOKENS = 128
STREAMS = 16
CALLS = 300
NAME = "model"


def prompts() -> list[str]:
    return [f"The history of the city begins with number {i}, and the first thing that" for i in range(STREAMS)]


async def in_process(engine: EngineClient) -> float:
    """The total tokens/s of all streams, with the engine in this process."""

    async def one(text: str) -> int:
        params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        task = TextTask(prompt=Prompt(text=text), params=params)
        return sum([len(delta.tokens) async for delta in engine.generate(task)])

    begun = time.perf_counter()
    made = sum(await asyncio.gather(*map(one, prompts())))
    return made / (time.perf_counter() - begun)


async def through_grpc(client: AsyncClient) -> float:
    """The total tokens/s of all streams, through the server."""

    async def one(text: str) -> int:
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        return sum([len(delta.tokens) async for delta in client.generate(NAME, text, sampling)])

    begun = time.perf_counter()
    made = sum(await asyncio.gather(*map(one, prompts())))
    return made / (time.perf_counter() - begun)


async def unary_ms(call: object) -> float:
    """The median time of a unary call, in milliseconds."""
    times = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        await call()  # type: ignore[operator]
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


async def measure(folder: Path, address: str, repeats: int) -> dict[str, object]:
    """All measurements; both sides take turns, so that load of the machine affects them equally."""
    engine = InProcess(folder, EngineConfig())
    await engine.start()
    near, far = [], []
    async with AsyncClient(ClientSettings(address=address)) as client:
        await in_process(engine)
        await through_grpc(client)
        for _ in range(repeats):
            near.append(await in_process(engine))
            far.append(await through_grpc(client))
        inside = await unary_ms(lambda: engine.tokenize(Prompt(text="hello")))
        unary_grpc = await unary_ms(lambda: client.tokenize(NAME, "hello"))
    await engine.stop(0)
    return {
        "streams": STREAMS,
        "in_process_tokens_per_second": [round(rate, 1) for rate in near],
        "grpc_tokens_per_second": [round(rate, 1) for rate in far],
        "grpc_share": round(statistics.median(far) / statistics.median(near), 3),
        "unary_in_process_ms": round(inside, 3),
        "unary_grpc_ms": round(unary_grpc, 3),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    attn = Path(sys.executable).with_name("attn")
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / "ready.json"
        words = [attn, "serve", "--port", "0", "--ready-file", ready, "--model", f"{NAME}={given.folder.resolve()}"]
        server = subprocess.Popen([*words, "--home", scratch], stdin=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if server.poll() is not None:
                    sys.exit("the server did not start")
                time.sleep(0.1)
            found = asyncio.run(measure(given.folder, json.loads(ready.read_text())["address"], given.repeats))
        finally:
            server.terminate()
            server.wait(60)
    print(json.dumps(found, indent=2))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
