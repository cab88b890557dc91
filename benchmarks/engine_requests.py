"""The measurements of `engine_cpu.py` with many successive requests: mixed lengths against equal ones, and memory."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from attn_engine import Engine, EngineConfig, build_engine
from attn_models.decoder.decoder import Decoder
from attn_models.loading import LoadedModel
from attn_models.quantization.quantize import prepack_model
from attn_schema.decoder import DecoderConfig
from engine_measures import drained, engine_of, long_ids, submit

MANY = 64
AT_ONCE = 16
PROMPTS, NEW = (8, 16, 32, 72), (8, 16, 24, 48)
"""The lengths of prompts and completions; all pairs are equally frequent, so the means equal the uniform batch's."""
SMALL = {"vocab_size": 64, "max_seq_len": 128, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "norm": "rms"}
SMALL |= {"feed_forward": "swiglu", "positions": "rotary"}
REQUESTS = 10_000
SETTLED = 2_000


def mixed(loaded: LoadedModel, cache: str, repeats: int) -> dict[str, Any]:
    """The tokens per second of 64 requests of mixed lengths that arrive one by one, 16 running at a time; also as a
    percentage of the rate of 64 requests of the mean lengths, which are all submitted at the start."""
    lengths = list(itertools.product(PROMPTS, NEW)) * (MANY // len(PROMPTS) // len(NEW))
    random.Random(7).shuffle(lengths)
    equal = [(statistics.mean(PROMPTS), statistics.mean(NEW))] * MANY
    rates: dict[str, list[float]] = {"mixed": [], "uniform": []}
    for _ in range(repeats):
        for name, wanted, at_start in (("mixed", lengths, AT_ONCE), ("uniform", equal, MANY)):
            engine = engine_of(loaded, cache, AT_ONCE, AT_ONCE * 160)
            start = time.perf_counter()
            tokens = _arriving(engine, loaded, [(int(p), int(n)) for p, n in wanted], at_start)
            rates[name].append(tokens / (time.perf_counter() - start))
    found = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "requests": MANY,
        "running": AT_ONCE,
        "tokens_per_second_mixed": round(found["mixed"], 1),
        "tokens_per_second_uniform": round(found["uniform"], 1),
        "percent_of_uniform": round(100 * found["mixed"] / found["uniform"], 1),
    }


def _arriving(engine: Engine, loaded: LoadedModel, wanted: list[tuple[int, int]], at_start: int) -> int:
    """Submit `at_start` requests at once, then one more at each step; returns the new tokens of all requests."""
    tokens = 0
    for i, (prompt, new) in enumerate(wanted):
        # All prompts begin with different tokens, so that the prefix cache is never hit.
        submit(engine, str(i), [i + 1, *long_ids(loaded, prompt)[1:]], new)
        if i >= at_start - 1:
            tokens += sum(len(event.delta.tokens) for event in engine.step())
    return tokens + drained(engine)


def memory() -> dict[str, Any]:
    """The resident megabytes of this process after 2,000 and 10,000 requests to a small model, with prefix caching."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.from_plain(SMALL)).eval()
    prepack_model(model, torch.float32)
    engine = build_engine(model, config=EngineConfig(kv_cache="shared", max_num_seqs=64), kv_cache_tokens=64 * 64)
    draw = random.Random(3)
    held = {}
    for i in range(REQUESTS):
        prompt = [draw.randrange(model.vocab_size) for _ in range(draw.randrange(4, 40))]
        submit(engine, str(i), prompt, draw.randrange(1, 6))
        if i % 64 == 63:
            drained(engine)
        if i + 1 == SETTLED:
            held["megabytes_after_2000"] = _resident()
    drained(engine)
    held["megabytes_after_10000"] = _resident()
    return {"requests": REQUESTS, "model": SMALL} | held


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 1e6, 1)
