"""The effect of prefill replicas on running streams while long prompts arrive, and the length from which they pay.

`attn serve` with a random model over loopback, one thread for each engine: two mixed replicas, against one prefill
replica and one decode replica. Streams with short prompts run all the time; long prompts arrive at random times
(Poisson), the same ones at the same times for both. Both setups alternate, as the load of the machine varies.

    python benchmarks/disaggregated_prefill.py --out benchmarks/results/disaggregated-prefill.json    six minutes
    python benchmarks/disaggregated_prefill.py --short                                                two minutes
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import torch
from attn.v1 import common_pb2, inference_pb2
from attn.v1.inference_pb2_grpc import InferenceServiceStub
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import DecoderConfig
from overload import LETTERS, serving
from report import write_report

SIZE = {"hidden_size": 384, "num_layers": 8, "num_heads": 6, "max_seq_len": 2048}
STREAMS, SHORT, LONG, NEW = 4, 16, 768, 400
"""The number of running streams, the tokens of their prompts and of long prompts, and the new tokens of a stream."""
RATE = 0.5
"""Long prompts per second."""
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
KINDS = {
    "two mixed replicas": ("--replicas", "2"),
    "one prefill and one decode replica": ("--replicas", "1", "--prefill-replicas", "1", "--prefill-min-tokens", "64"),
}


@contextlib.asynccontextmanager
async def server(home: Path, *words: str) -> AsyncIterator[InferenceServiceStub]:
    """Run `attn serve` with the model in the folder `home`; yields a stub for it."""
    async with serving(home, *words) as running, grpc.aio.insecure_channel(running.address) as channel:
        yield InferenceServiceStub(channel)


def save(folder: Path) -> None:
    """Save a character-level decoder with random weights."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer(LETTERS)
    save_model(folder, Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size, mechanism="mha", **SIZE)), tokenizer)


async def times(stub: InferenceServiceStub, prompt: list[int], new: int) -> list[float]:
    """The times, in seconds, at which a request was sent and at which each of its messages arrived."""
    params = inference_pb2.SamplingParams(max_new_tokens=new, ignore_eos=True)
    ids = common_pb2.TokenIds(ids=prompt)
    asked = inference_pb2.GenerateRequest(model="m", prompt=common_pb2.Prompt(token_ids=ids), sampling=params)
    sent = time.monotonic()
    return [sent, *[time.monotonic() async for _ in stub.Generate(asked)]]


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    """A random prompt, which the prefix cache does not hold."""
    return [rng.randrange(3, len(LETTERS)) for _ in range(tokens)]


async def load(stub: InferenceServiceStub, seconds: float, rate: float) -> dict[str, Any]:
    """The times to first token of long prompts, and the gaps between messages of the running streams."""
    rng, end = random.Random(3), time.monotonic() + seconds
    gaps: list[float] = []

    async def stream(seed: int) -> None:
        own = random.Random(seed)
        while time.monotonic() < end:
            came = (await times(stub, prompt_of(own, SHORT), NEW))[1:]
            gaps.extend(after - before for before, after in pairwise(came))

    streams = [asyncio.ensure_future(stream(seed)) for seed in range(STREAMS)]
    await asyncio.sleep(1.0)
    asked, at = [], time.monotonic()
    while rate and (at := at + rng.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        asked.append(asyncio.ensure_future(times(stub, prompt_of(rng, LONG), 2)))
    first = [found[1] - found[0] for found in await asyncio.gather(*asked)]
    await asyncio.gather(*streams)
    stats = await stub.GetEngineStats(inference_pb2.GetEngineStatsRequest(model="m"))
    return {
        "long prompts": len(first),
        "first token p50 [s]": quantile(first, 0.5),
        "first token p95 [s]": quantile(first, 0.95),
        "gap p50 [s]": quantile(gaps, 0.5),
        "gap p95 [s]": quantile(gaps, 0.95),
        "gap p99 [s]": quantile(gaps, 0.99),
        "gap largest [s]": quantile(gaps, 1.0),
        "stream tokens a second": round(len(gaps) / seconds, 1),
        "imported tokens": stats.imported_tokens,
        "machine load": os.getloadavg()[0],
    }


async def by_length(stub: InferenceServiceStub, repeats: int) -> dict[int, float]:
    """The median time to first token of a single prompt, by prompt length."""
    rng, found = random.Random(5), {}
    for length in LENGTHS:
        took = []
        for _ in range(repeats):
            came = await times(stub, prompt_of(rng, length), 1)
            took.append(came[1] - came[0])
        found[length] = round(statistics.median(took), 4)
    return found


def quantile(values: list[float], share: float) -> float | None:
    """A quantile, as one of the values (no interpolation); None if there are no values."""
    ordered = sorted(values)
    return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 4) if ordered else None


async def measure(rounds: int, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """The measurements of each setup in each round, and those by prompt length."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        save(Path(home) / "models" / "m")
        for number in range(rounds):
            for kind, words in KINDS.items():
                async with server(Path(home), *words) as stub:
                    await times(stub, prompt_of(random.Random(1), LONG), 2)
                    rows.append({"kind": kind, "round": number, "rate": RATE, **await load(stub, seconds, RATE)})
                    print(json.dumps(rows[-1]), flush=True)
        for kind, least in (("computed where it is decoded", "2048"), ("moved", "2")):
            words = ("--replicas", "1", "--prefill-replicas", "1", "--prefill-min-tokens", least)
            async with server(Path(home), *words) as stub:
                await by_length(stub, 1)
                rows.append({"kind": kind, "first token by tokens of the prompt [s]": await by_length(stub, repeats)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--short", action="store_true", help="one short round")
    parser.add_argument("--out", type=Path, help="where to write the figures; by default among the results")
    asked = parser.parse_args()
    rows = asyncio.run(measure(1, 15.0, 3) if asked.short else measure(2, 40.0, 9))
    facts = {
        "question": "do prefill replicas keep streams steady while long prompts arrive, at the same number of engines?",
        "model": SIZE,
        "load": {"streams": STREAMS, "tokens of a long prompt": LONG, "long prompts a second": RATE},
    }
    if asked.out or not asked.short:
        write_report("disaggregated-prefill", facts, rows, asked.out)


if __name__ == "__main__":
    main()
