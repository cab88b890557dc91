"""How fast does the engine decode on a CPU, beside the systems people would use instead?

One workload for all: greedy decoding of short prompts, a fixed number of new tokens, the end token ignored, at several
batch sizes. Peers run in the same sitting, each in its own virtual environment (they pin different libraries), through
the scripts of a folder given with --peers:

    python benchmarks/engine_cpu.py MODEL_FOLDER --peers ../shared/peers --transformers PYTHON --vllm PYTHON

Rates are new tokens a second, medians of the repeats; whoever compares quotes ratios of one run. The result, with the
machine and its load before and after, goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import write_report

NEW_TOKENS = 128
BATCHES = (1, 16, 64)
PEERS = {"transformers": "peer_hf.py", "vllm": "peer_vllm.py", "llamacpp": "peer_llamacpp.py"}


def prompts(count: int) -> list[str]:
    """The same prompts as the peers'."""
    return [f"The history of the city begins with number {i}, and the first thing that" for i in range(count)]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="model folder in the Hugging Face layout")
    p.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    p.add_argument("--caches", nargs="+", default=["contiguous"])
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--peers", type=Path, help="folder with the scripts of the peers")
    p.add_argument("--gguf", type=Path, help="the model as GGUF, for llama.cpp")
    for peer in PEERS:
        p.add_argument(f"--{peer}", type=Path, metavar="PYTHON", help=f"the interpreter that has {peer}")
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    return p.parse_args()


def measure_ours(args: argparse.Namespace, dtype: str, cache: str) -> Iterator[dict[str, Any]]:
    import torch
    from attn_engine import Request, Sampling, build_engine
    from attn_models.loading import load_model

    torch.set_num_threads(args.threads)
    loaded = load_model(args.model, dtype)

    def run(batch: int) -> int:
        engine = build_engine(loaded.model, loaded.tokenizer, cache=cache, requests=batch, tokens=batch * 256)
        task = Sampling(max_new_tokens=NEW_TOKENS, ignore_end=True)
        for i, prompt in enumerate(prompts(batch)):
            engine.submit(Request(id=str(i), token_ids=tuple(loaded.tokenizer.encode(prompt)), task=task))
        tokens = 0
        while not engine.idle:
            tokens += sum(len(event.tokens) for event in engine.step())
        return tokens

    for batch in args.batches:
        yield {"system": "attn", "dtype": dtype, "cache": cache, "batch": batch} | timed(run, batch, args.repeats)


def timed(run: Any, batch: int, repeats: int) -> dict[str, float]:
    """Median and range of the rate; the first, short run only warms up."""
    run(min(batch, 2))
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        tokens = run(batch)
        rates.append(tokens / (time.perf_counter() - start))
    return {
        "tokens_per_second": round(statistics.median(rates), 1),
        "min": round(min(rates), 1),
        "max": round(max(rates), 1),
    }


def measure_peer(args: argparse.Namespace, peer: str, dtype: str) -> Iterator[dict[str, Any]]:
    """What the peer's script says, line by line; its errors are shown."""
    model = args.gguf if peer == "llamacpp" else args.model
    command = [getattr(args, peer), args.peers / PEERS[peer], model, "--dtype", dtype, "--repeats", args.repeats]
    command += ["--batches", *args.batches]
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            rates = {key: said[key] for key in ("tokens_per_second", "min", "max")}
            yield {"system": peer, "dtype": dtype, "batch": said["batch"]} | rates


def rounds(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for dtype in args.dtypes:
        for cache in args.caches:
            yield from measure_ours(args, dtype, cache)
        for peer in PEERS:
            if getattr(args, peer) is not None:
                yield from measure_peer(args, peer, dtype)


def main() -> None:
    args = arguments()
    facts = {
        "question": "tokens a second while decoding greedily on a CPU",
        "threads": args.threads,
        "new_tokens": NEW_TOKENS,
    }
    write_report("engine_cpu", facts, rounds(args), args.out)


if __name__ == "__main__":
    main()
