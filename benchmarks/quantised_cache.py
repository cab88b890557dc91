"""What does a quantised KV cache cost in quality? The perplexity of a model on a real text, for each cache.

    python benchmarks/quantised_cache.py MODEL_FOLDER TEXT_FILE

The engine scores windows of the text, evenly spread over it, with each cache: every token is predicted from the cached
states of the tokens before it. Reports the perplexity, the mean absolute difference of a token's log probability to
that with the first cache, and the bytes of a window by the cache's formula. The result, with the machine and its load
before and after, is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attn_core import installed
from attn_engine import EngineConfig, Request, ScoringParams, build_engine
from attn_models.loading import load_model
from report import write_report

CACHES = ("shared", "float16", "int8", "int4", "kivi4", "kivi")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="model folder in the Hugging Face layout")
    p.add_argument("text", type=Path, help="text file")
    p.add_argument("--caches", nargs="+", default=list(CACHES))
    p.add_argument("--windows", type=int, default=4)
    p.add_argument("--window", type=int, default=1024, help="tokens of a window")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    return p.parse_args()


def windows(ids: list[int], count: int, length: int) -> list[tuple[int, ...]]:
    """`count` windows of `length` tokens, evenly spread over the text."""
    if len(ids) < count * length:
        raise SystemExit(f"the text has {len(ids)} tokens; {count} windows of {length} need {count * length}")
    stride = len(ids) // count
    return [tuple(ids[start : start + length]) for start in range(0, count * stride, stride)]


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(args.threads)
    loaded = load_model(args.model, args.dtype)
    asked = windows(loaded.tokenizer.encode(args.text.read_text()), args.windows, args.window)
    first: list[float] | None = None
    for cache in args.caches:
        limits = EngineConfig(max_num_batched_tokens=args.window)
        engine = build_engine(
            loaded.model, config=limits.replace(kv_cache=cache, max_num_seqs=1), kv_cache_tokens=args.window
        )
        begun, logprobs = time.perf_counter(), list[float]()
        for number, ids in enumerate(asked):
            engine.submit(Request(id=str(number), token_ids=ids, params=ScoringParams()))
            while not engine.idle:
                for event in engine.step():
                    logprobs += [token.logprob for token in event.delta.tokens if token.logprob is not None]
        first = first or logprobs
        family = installed().caches.get(cache)
        weight = family.bytes(loaded.model.state_specs(), tokens=args.window, dtype=args.dtype)
        yield {
            "cache": cache,
            "perplexity": round(math.exp(-sum(logprobs) / len(logprobs)), 3),
            "mean_absolute_difference_nats": round(
                sum(abs(a - b) for a, b in zip(logprobs, first, strict=True)) / len(first), 4
            ),
            "tokens": len(logprobs),
            "bytes_per_window": weight,
            "seconds": round(time.perf_counter() - begun, 1),
        }


def main() -> None:
    args = arguments()
    facts = {"question": "perplexity by cache", "dtype": args.dtype, "window": args.window, "text": args.text.name}
    write_report("quantised_cache", facts, rows(args), args.out)


if __name__ == "__main__":
    main()
