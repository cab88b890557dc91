"""How fast does the engine decode on a CPU, compared with vLLM, transformers and llama.cpp?

The same workload for all: greedy decoding of short prompts, with a fixed number of new tokens and the end token
ignored, at several batch sizes; then the prefill of a prompt of 1000 tokens, and the time to a first token while 16
streams run. For attn also: the cost of a step outside the model, the share of sampling, requests of mixed lengths
against equal ones, and memory over 10,000 requests. Peers are measured in the same run, each in its own virtual
environment (they pin different libraries), with the scripts in the folder --peers and `engine_peers.py`:

    python benchmarks/engine_cpu.py MODEL_FOLDER --peers ../shared/peers --transformers PYTHON --vllm PYTHON

The row of a peer that fails or takes too long reports that. The whole run takes about ten minutes on two idle cores.

Rates are new tokens per second, medians of the repeats; only ratios within one run should be compared. The result, with
the machine and its load before and after, is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_measures import LONG_PROMPT, first_token, load_form, new_tokens, outside, prefill, sampling
from engine_requests import memory, mixed
from report import write_report

NEW_TOKENS = 32
BATCHES = (1, 16, 64)
PEERS = {"transformers": "peer_hf.py", "vllm": "peer_vllm.py", "llamacpp": "peer_llamacpp.py"}
RUNS = (
    ("vllm", "bfloat16", BATCHES),
    ("transformers", "float32", BATCHES),
    ("transformers", "bfloat16", BATCHES[:2]),
    ("llamacpp", "Q4_1", BATCHES[:1]),
)
"""The peers with their element types and batch sizes; llama.cpp's binding does not support batches."""
AS_MANY = """
import functools, runpy, sys
script, new, eager, *sys.argv[1:] = sys.argv[1:]
if eager == "eager":
    import vllm
    vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
sys.path.insert(0, script.rpartition("/")[0])
import workload
workload.NEW_TOKENS = int(new)
runpy.run_path(script, run_name="__main__")
"""
"""The source of a program that runs a peer's script with the same number of new tokens."""


def prompts(count: int) -> list[str]:
    """The prompts, the same as in the peers' scripts."""
    return [f"The history of the city begins with number {i}, and the first thing that" for i in range(count)]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="model folder in the Hugging Face layout")
    p.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    p.add_argument(
        "--forms",
        nargs="*",
        default=["weights=auto", "weights=bfloat16", "weights=int8", "weights=int4"],
        help="our forms of weights: an element type, or weights=FORMAT for packed ones",
    )
    p.add_argument("--cache", default="shared")
    p.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--peers", type=Path, help="folder with the scripts of the peers")
    p.add_argument("--peer-seconds", type=float, default=240, help="how long a script of a peer may take")
    p.add_argument("--vllm-dtype", help="vLLM's element type where it is not bfloat16")
    p.add_argument("--vllm-eager", action="store_true", help="vLLM without its compiler, which takes minutes")
    p.add_argument("--gguf", type=Path, help="the model as GGUF, for llama.cpp")
    for peer in PEERS:
        p.add_argument(f"--{peer}", type=Path, metavar="PYTHON", help=f"the interpreter that has {peer}")
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    return p.parse_args()


def measure_ours(args: argparse.Namespace, form: str) -> Iterator[dict[str, Any]]:
    """Measure attn: throughput by batch size, a long prompt, first tokens, cost outside the model, sampling."""
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
    for batch in args.batches[1:] or args.batches:
        yield from (facts | row for row in sampling(loaded, args.cache, batch))


def timed(run: Any, batch: int, repeats: int) -> dict[str, float]:
    """The median and range of the rate in tokens per second, after a short warm-up run."""
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


def measure_peer(args: argparse.Namespace, peer: str, dtype: str, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Measure a peer: the results that its scripts print, including errors."""
    model = args.gguf if peer == "llamacpp" else args.model
    facts = {"system": peer, "dtype": dtype} | ({"eager": True} if peer == "vllm" and args.vllm_eager else {})
    asked = [model, "--dtype", dtype, "--repeats", args.repeats]
    eager = peer == "vllm" and args.vllm_eager
    mode = "eager" if eager else "as it is"
    wanted = ["--batches", *(batch for batch in batches if batch in args.batches)]
    script = (args.peers / PEERS[peer]).resolve()
    for said in answers(args, [getattr(args, peer), "-c", AS_MANY, script, args.new_tokens, mode, *asked, *wanted]):
        yield facts | {key: said[key] for key in ("batch", "tokens_per_second", "min", "max", "trouble") if key in said}
    if peer != "llamacpp":
        more, options = Path(__file__).parent / "engine_peers.py", ["--threads", args.threads, *["--eager"] * eager]
        for said in answers(args, [getattr(args, peer), more, peer, *asked, *options]):
            prefill = {"prompt": LONG_PROMPT, "tokens_per_second": said.pop("prefill")} if "prefill" in said else {}
            yield facts | prefill | said


def answers(args: argparse.Namespace, command: list[Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects that a command prints, and one that reports a failure if there was one."""
    # By default vLLM would leave one core idle.
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    said = [str(part) for part in command]
    trouble = None
    try:
        done = subprocess.run(said, stdout=subprocess.PIPE, timeout=args.peer_seconds, env=environment, check=False)
        printed = done.stdout
        if done.returncode:
            trouble = f"ended with {done.returncode}"
    except subprocess.TimeoutExpired as late:
        printed, trouble = late.stdout or b"", f"took longer than {args.peer_seconds:g} s"
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith("{"):
            yield json.loads(line)
    if trouble is not None:
        print(f"{said[0]} {trouble}", file=sys.stderr)
        yield {"trouble": trouble}


def rounds(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.forms:
        yield {"system": "attn"} | memory()
    for form in args.forms:
        yield from measure_ours(args, form)
    for form in args.forms:
        loaded, _ = load_form(args, form)
        yield {"system": "attn", "form": form, "cache": args.cache} | mixed(loaded, args.cache, args.repeats)
    for peer, dtype, batches in RUNS:
        if getattr(args, peer) is not None:
            chosen = args.vllm_dtype or dtype if peer == "vllm" else dtype
            yield from measure_peer(args, peer, chosen, batches)


def main() -> None:
    args = arguments()
    facts = {
        "question": "tokens a second while decoding greedily on a CPU",
        "threads": args.threads,
        "instructions": os.environ.get("ATTN_CPU_ISA") or "the best of the chip",
        "new_tokens": args.new_tokens,
    }
    write_report("engine_cpu", facts, rounds(args), args.out)


if __name__ == "__main__":
    main()
