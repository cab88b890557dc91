"""The measurements that `engine_cpu.py` makes of attn's engine."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import torch
from attn_engine import Engine, EngineConfig, Request, SamplingParams, build_engine, output_processor
from attn_models.loading import LoadedModel, load_model

LONG_PROMPT = 1000
"""The length of the prompt for measuring prefill, in tokens."""
RUNNING = 16
"""The number of streams that run while the time to a first token is measured."""
INSIDE = ("step", "logits", "greedy_tokens")
"""The methods of a model that the engine calls in a step."""
SAMPLED: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k and top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.2,
    },
}
"""The compared sampling parameters, by name."""
SAMPLED_STEPS = 20


def load_form(args: argparse.Namespace, form: str) -> tuple[LoadedModel, float]:
    """Load the model in an element type, or with packed weights for the form `weights=FORMAT`; also returns seconds."""
    torch.set_num_threads(args.threads)
    dtype, _, weights = form.partition("weights=")
    given = {"dtype": dtype or "float32", "quantization": weights or None}
    load_model(args.model, verify="sizes", **given)  # warm-up: compiles kernels and reads the files into the page cache
    start = time.perf_counter()
    loaded = load_model(args.model, verify="sizes", **given)
    return loaded, round(time.perf_counter() - start, 2)


def engine_of(loaded: LoadedModel, cache: str, requests: int, tokens: int) -> Engine:
    limits = EngineConfig(max_num_batched_tokens=max(2048, requests))
    return build_engine(
        loaded.model, loaded.tokenizer, limits.replace(kv_cache=cache, max_num_seqs=requests), kv_cache_tokens=tokens
    )


def submit(
    engine: Engine, name: str, ids: list[int], new: int, source: tuple[int, ...] | None = None, **sampling: Any
) -> None:
    task = SamplingParams(max_new_tokens=new, ignore_eos=True, **sampling)
    engine.submit(Request(id=name, token_ids=tuple(ids), params=task, encoder_token_ids=source))


def drained(engine: Engine) -> int:
    """Run the engine until it is idle; returns the number of new tokens."""
    tokens = 0
    while not engine.idle:
        tokens += sum(len(event.delta.tokens) for event in engine.step())
    return tokens


def new_tokens(loaded: LoadedModel, cache: str, prompts: list[str], new: int) -> int:
    """Generate `new` tokens for each prompt; returns the total number of new tokens."""
    engine = engine_of(loaded, cache, len(prompts), len(prompts) * 256)
    for i, prompt in enumerate(prompts):
        submit(engine, str(i), loaded.tokenizer.encode(prompt), new)
    return drained(engine)


def long_ids(loaded: LoadedModel, count: int) -> list[int]:
    return [7 + 13 * i % (loaded.model.vocab_size - 20) for i in range(count)]


def prefill(loaded: LoadedModel, cache: str) -> int:
    """Compute a long prompt in one step; returns its number of tokens."""
    engine = engine_of(loaded, cache, 1, LONG_PROMPT + 64)
    submit(engine, "long", long_ids(loaded, LONG_PROMPT), 1)
    drained(engine)
    return LONG_PROMPT


def first_token(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds from submission to the first token of a prompt of 64 tokens, alone and with running streams."""
    found = {}
    for running in (0, RUNNING):
        times = []
        for _ in range(args.repeats):
            engine = engine_of(loaded, args.cache, running + 1, (running + 1) * 256)
            for i in range(running):
                submit(engine, str(i), long_ids(loaded, 20 + i), 64)
            for _ in range(4):
                engine.step()
            start = time.perf_counter()
            submit(engine, "new", long_ids(loaded, 64), 4)
            while not any(event.request_id == "new" and event.delta.tokens for event in engine.step()):
                pass
            times.append(time.perf_counter() - start)
        found[f"first_token_ms_beside_{running}"] = round(statistics.median(times) * 1e3, 1)
    return found


def outside(loaded: LoadedModel, cache: str, batch: int) -> dict[str, Any]:
    """The share of a decode step that is spent outside the model, with `batch` streams, in percent of CPU time."""
    inside = [0.0]
    model = loaded.model
    kept = {name: getattr(model, name) for name in INSIDE if hasattr(model, name)}

    def timed(call: Any) -> Any:
        def run(*arguments: Any) -> Any:
            start = time.thread_time()
            answer = call(*arguments)
            inside[0] += time.thread_time() - start
            return answer

        return run

    engine = engine_of(loaded, cache, batch, batch * 256)
    for i in range(batch):
        submit(engine, str(i), long_ids(loaded, 20), 64)
    for _ in range(4):
        engine.step()
    for name, call in kept.items():
        setattr(model, name, timed(call))
    start = time.thread_time()
    for _ in range(20):
        engine.step()
    whole = time.thread_time() - start
    for name in kept:
        delattr(model, name)
    return {"batch": batch, "percent_outside_the_model": round(100 * (1 - inside[0] / whole), 1)}


def sampled_engine(loaded: LoadedModel, cache: str, batch: int, given: dict[str, float]) -> Engine:
    """An engine with `batch` running streams, in which each step waits for the tokens of the previous one."""
    engine = engine_of(loaded, cache, batch, batch * 256)
    for i in range(batch):
        submit(engine, str(i), long_ids(loaded, 20), 2 * SAMPLED_STEPS, seed=i, **given)
    for _ in range(4):
        engine.step()
    return engine


def sampling(loaded: LoadedModel, cache: str, batch: int) -> list[dict[str, Any]]:
    """For each set of sampling parameters, with `batch` streams: the median milliseconds of a decode step, the
    difference to greedy decoding, and the percentage of the step's time that is spent on choosing tokens from logits.

    Greedy tokens are found during the multiplication with the unembedding, which does not write logits; the others
    also pay for writing them. The parameters take turns, one step each.
    """
    engines = {name: sampled_engine(loaded, cache, batch, given) for name, given in SAMPLED.items()}
    steps: dict[str, list[float]] = {name: [] for name in SAMPLED}
    chosen: dict[str, list[float]] = {name: [] for name in SAMPLED}
    spent = [0.0]

    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        tokens = chosen_tokens(*arguments, **named)
        spent[0] += time.perf_counter() - start
        return tokens

    chosen_tokens = output_processor.chosen_tokens
    with mock.patch.object(output_processor, "chosen_tokens", timed):
        for _ in range(SAMPLED_STEPS):
            for name, engine in engines.items():
                spent[0], start = 0.0, time.perf_counter()
                engine.step()
                steps[name].append(time.perf_counter() - start)
                chosen[name].append(spent[0] / steps[name][-1])
    greedy = statistics.median(steps["greedy"])
    return [
        {
            "batch": batch,
            "sampling": name,
            "step_ms": round(statistics.median(taken) * 1e3, 2),
            "percent_more_than_greedy": round(100 * (statistics.median(taken) / greedy - 1), 1),
            "percent_choosing": round(100 * statistics.median(chosen[name]), 1),
        }
        for name, taken in steps.items()
    ]


def slope(loaded: LoadedModel, cache: str, contexts: tuple[int, ...]) -> dict[str, float]:
    """The processor milliseconds of a decoded token at each context length, and the milliseconds added by a thousand
    tokens of context (least squares)."""
    times = []
    for context in contexts:
        engine = engine_of(loaded, cache, 1, context + 64)
        source = tuple(range(8)) if getattr(loaded.model, "max_encoder_len", None) else None
        submit(engine, "one", long_ids(loaded, context), 16, source)
        while engine.step() == []:
            pass
        steps = []
        while not engine.idle:
            start = time.process_time()
            engine.step()
            steps.append(time.process_time() - start)
        times.append(statistics.median(steps) * 1e3)
    middle, mean = statistics.mean(contexts), statistics.mean(times)
    top = sum((c - middle) * (t - mean) for c, t in zip(contexts, times, strict=True))
    per_thousand = 1000 * top / sum((c - middle) ** 2 for c in contexts)
    return {f"ms_at_{c}": round(t, 2) for c, t in zip(contexts, times, strict=True)} | {
        "ms_per_1000_tokens": round(per_thousand, 3)
    }
