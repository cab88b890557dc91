"""The time of a prompt of 1000 tokens, and of a first token while streams run, in the peers of `engine_cpu.py`.

Runs with the peer's own interpreter: python benchmarks/engine_peers.py transformers|vllm MODEL_FOLDER --dtype bfloat16
Prints one JSON object. For transformers only the prompt is measured, as it has no concurrent streams.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")  # by default vLLM leaves one core idle

LONG_PROMPT = 1000
SHORT_PROMPT = 64
RUNNING = 16


def ids(count: int, first: int = 7) -> list[int]:
    return [first] + [7 + 13 * i % 49000 for i in range(1, count)]


def seconds(run: Callable[[int], None], repeats: int) -> float:
    """The median seconds of `repeats` runs after one warm-up run."""
    times = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        run(i)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def of_transformers(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))

    def prefill(_: int) -> None:
        given = torch.tensor([ids(LONG_PROMPT)])
        model.generate(input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=1, do_sample=False)

    return {"prefill": LONG_PROMPT / seconds(prefill, args.repeats)}


def of_vllm(args: argparse.Namespace) -> dict[str, float]:
    from vllm import LLM, SamplingParams

    llm = LLM(args.model, dtype=args.dtype, max_model_len=2048, enable_prefix_caching=False, enforce_eager=args.eager)
    engine: Any = llm.llm_engine

    def add(name: str, count: int, new: int, first: int = 7) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": ids(count, first)}, params)

    def until(name: str) -> None:
        while not any(output.request_id == name and output.outputs[0].token_ids for output in engine.step()):
            pass

    def prefill(i: int) -> None:
        add(f"long {i}", LONG_PROMPT, 1)
        until(f"long {i}")

    found = {"prefill": LONG_PROMPT / seconds(prefill, args.repeats)}
    times = []
    for i in range(args.repeats + 1):
        for stream in range(RUNNING):
            add(f"{i} stream {stream}", 20 + stream, 64, 8 + stream)
        for _ in range(4):
            engine.step()
        start = time.perf_counter()
        add(f"new {i}", SHORT_PROMPT, 4, 99)
        until(f"new {i}")
        times.append(time.perf_counter() - start)
        while engine.has_unfinished_requests():
            engine.step()
    return found | {f"first_token_ms_beside_{RUNNING}": statistics.median(times[1:]) * 1e3}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("peer", choices=["transformers", "vllm"])
    p.add_argument("model")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--eager", action="store_true", help="vLLM without its compiler")
    args = p.parse_args()
    found = of_vllm(args) if args.peer == "vllm" else of_transformers(args)
    print(json.dumps({name: round(value, 1) for name, value in found.items()}))


if __name__ == "__main__":
    main()
