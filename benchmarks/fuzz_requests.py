"""Sends many fuzzed requests through the real gateway; exits with 1 if any of them causes an internal server error.

python benchmarks/fuzz_requests.py --count 200000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc.aio
import structlog
from attn_gateway import serving
from attn_schema import EngineConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "services" / "attn-serve" / "tests"))

from fuzzing import fuzz
from report import write_report

from conftest import LocalInference, save_encoder, save_tiny

BATCH = 2000
TOGETHER = 300
"""The number of concurrent calls of a connection: more than the server allows."""


async def run(count: int, seed: int, home: Path) -> tuple[Counter[str], list[str]]:
    """Send the requests; prints and returns the counts of their outcomes, and returns the server errors."""
    total: Counter[str] = Counter()
    faults: list[str] = []
    began = time.monotonic()
    inference = LocalInference(home)
    async with serving([inference]) as gateway, grpc.aio.insecure_channel(gateway.address) as channel:
        await inference.served.load("tiny-linear", "", EngineConfig(num_threads=1))
        for place in range(0, count, BATCH):
            ended, found = await fuzz(channel, seed + place, min(BATCH, count - place), TOGETHER)
            total += ended
            faults += found
            print(
                f"{place + BATCH} in {time.monotonic() - began:.0f} s: {dict(total)}, faults: {len(faults)}", flush=True
            )
            for fault in found[:3]:
                print(fault, flush=True)
    return total, faults


def main() -> int:
    """Run the benchmark; returns 1 if there were server errors, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to write the figures; by default among the results")
    asked = parser.parse_args()
    logging.disable(logging.ERROR)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory() as home:
        for name, mechanism, seed in (("tiny", "mha", 1), ("tiny-linear", "linear", 2)):
            save_tiny(Path(home) / "models" / name, mechanism, seed=seed)
        save_encoder(Path(home) / "models" / "tiny-bert")
        total, faults = asyncio.run(run(asked.count, asked.seed, Path(home)))
    facts = {"question": "is any request answered with a fault of the server?", "requests": asked.count}
    facts |= {"seed": asked.seed, "calls of a connection at a time": TOGETHER, "faults": len(faults)}
    write_report("fuzz", facts, [dict(total)], asked.out)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
