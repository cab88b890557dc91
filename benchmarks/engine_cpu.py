"""How fast does the engine decode on a CPU, beside the systems people would use instead?

One workload for all: greedy decoding of short prompts, a fixed number of new tokens, the end token ignored, at several
batch sizes. Of ours also: a prompt of 1000 tokens, the time to a first token, and a step's share outside the model.
Peers run in the same sitting, each in its own virtual environment (they pin different libraries), through the scripts
of a folder given with --peers:

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

from engine_measures import LONG_PROMPT, first_token, load_form, new_tokens, outside, prefill
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
    p.add_argument(
        "--forms",
        nargs="+",
        default=["float32", "weights=float32", "weights=bfloat16", "weights=int8", "weights=int4"],
        help="our forms of weights: an element type, or weights=FORMAT for packed ones",
    )
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="the peers' element types")
    p.add_argument("--cache", default="shared")
    p.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="the peers' scripts must make as many")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--peers", type=Path, help="folder with the scripts of the peers")
    p.add_argument("--gguf", type=Path, help="the model as GGUF, for llama.cpp")
    for peer in PEERS:
        p.add_argument(f"--{peer}", type=Path, metavar="PYTHON", help=f"the interpreter that has {peer}")
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    return p.parse_args()


def measure_ours(args: argparse.Namespace, form: str) -> Iterator[dict[str, Any]]:
    """Throughput at every batch size, a long prompt, first tokens and what a step costs outside the model."""
    loaded, seconds = load_form(args, form)
    facts = {"system": "attn", "form": form, "cache": args.cache}
    yield facts | {"seconds_to_load": seconds}

    def run(batch: int) -> int:
        return new_tokens(loaded, args.cache, prompts(batch), args.new_tokens)

    for batch in args.batches:
        yield facts | {"batch": batch} | timed(run, batch, args.repeats)
    yield facts | {"prompt": LONG_PROMPT} | timed(lambda _: prefill(loaded, args.cache), 1, args.repeats)
    yield facts | first_token(loaded, args)
    yield facts | outside(loaded, args.cache, args.batches[-1])


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
    for form in args.forms:
        yield from measure_ours(args, form)
    for peer in PEERS:
        if getattr(args, peer) is not None:
            for dtype in ("Q4_1",) if peer == "llamacpp" else args.dtypes:
                yield from measure_peer(args, peer, dtype)


def main() -> None:
    args = arguments()
    facts = {
        "question": "tokens a second while decoding greedily on a CPU",
        "threads": args.threads,
        "new_tokens": args.new_tokens,
    }
    write_report("engine_cpu", facts, rounds(args), args.out)


if __name__ == "__main__":
    main()
