"""The time of a step with prompts as a CUDA graph, compared with the same step in eager mode.

Random weights in the shapes of SmolLM2-135M and Llama 3 8B, in bfloat16. The time of a step is that of `Engine.step`,
until its tokens are on the host. Prompts begin differently in each step, so that the prefix cache is never hit; streams
that decode get their token in the same step. `same_tokens` is the fraction of first tokens that are equal in both
modes; rounding may differ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from engine_gpu import SHAPES, TINY, attempt, random_model

from attn_engine import Engine, Request, build_engine  # isort: skip -- engine_gpu has made known what these find
from attn_engine.graphs import PROMPTS, Rerun, StepGraphs, StepLimits  # isort: skip
from attn_models.decoder.decoder import Decoder  # isort: skip
from attn_schema import EngineConfig, SamplingParams  # isort: skip

REPEATS, WARM = 9, 2


class Step(NamedTuple):
    """A step with prompts of these lengths and a number of decoding streams."""

    prompts: tuple[int, ...]
    streams: int = 0

    @property
    def case(self) -> str:
        """The description of the step in the report."""
        return f"{len(self.prompts)} x {self.prompts[0]} tokens of prompts, {self.streams} streams"


STEPS = (Step((16,)), Step((128,)), Step((100,) * 4), Step((512,), 32), Step((1024,)), Step((250,) * 8), Step((2000,)))
SMALL = (Step((5, 5)), Step((9,), 1))


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """One row for each model and step."""
    for name, shape in ({"tiny": TINY} if small else SHAPES).items():
        model = random_model(shape, device)
        engines = {way: engine_of(model, eager=way == "eager", small=small) for way in ("eager", "recorded")}
        for step in SMALL if small else STEPS:
            yield {"case": f"{name}, {step.case}", **attempt(measured, engines, step, device)}
        del model, engines
        if device == "cuda":
            torch.cuda.empty_cache()


def engine_of(model: Decoder, *, eager: bool, small: bool) -> Engine:
    """An engine whose steps are captured as CUDA graphs before the first request, unless `eager`."""
    tokens, sequences = (32, 4) if small else (2048 + 32, 64)
    config = EngineConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        max_cudagraph_capture_size=tokens,
        enforce_eager=eager,
    )
    engine = recording(model, config, kv_cache_tokens=512 if small else 32768)
    engine.warm_up()
    return engine


def recording(model: Decoder, config: EngineConfig, kv_cache_tokens: int) -> Engine:
    """An engine that records its steps unless the config forbids it; without graphs, it computes them anew."""
    engine = build_engine(model, None, config, kv_cache_tokens=kv_cache_tokens)
    runner = engine._runner  # noqa: SLF001 -- no option asks for graphs that are computed anew
    if runner.device.type != "cuda" and not config.enforce_eager:
        limits = StepLimits(config.max_num_batched_tokens, config.max_num_seqs)
        runner.graphs = StepGraphs(model, runner.store, Rerun(), limits)
    return engine


def measured(engines: dict[str, Engine], step: Step, device: str) -> dict[str, Any]:
    """The milliseconds of a step in both modes, and the fraction of first tokens that are equal."""
    turns = (WARM, REPEATS) if device == "cuda" else (0, 1)
    found: dict[str, Any] = {}
    tokens: dict[str, list[int]] = {}
    for way, engine in engines.items():
        times, tokens[way] = timed(engine, step, turns)
        found[f"{way}_ms"] = round(1e3 * statistics.median(times), 3)
    pairs = list(zip(tokens["eager"], tokens["recorded"], strict=True))
    found["eager_over_recorded"] = round(found["eager_ms"] / found["recorded_ms"], 3)
    found["same_tokens"] = round(sum(one == other for one, other in pairs) / len(pairs), 3)
    found["eager_reason"] = engines["recorded"].eager_reasons.get(PROMPTS)
    return found


def timed(engine: Engine, step: Step, turns: tuple[int, int]) -> tuple[list[float], list[int]]:
    """The seconds of steps with prompts after warm-up steps, and the first tokens of the prompts."""
    warm, counted = turns
    for number in range(step.streams):
        submit(engine, f"stream {number}", 16, 2 * (warm + counted) + step.streams + 4, number)
    for _ in range(step.streams and 2):
        engine.step()
    times, tokens = [], list[int]()
    for turn in range(warm + counted):
        for place, length in enumerate(step.prompts):
            submit(engine, f"prompt {turn}.{place}", length, 1, 1000 + 17 * turn + place)
        began = time.perf_counter()
        outputs = engine.step()
        took = time.perf_counter() - began
        tokens += [token.id for one in outputs if one.request_id.startswith("prompt") for token in one.delta.tokens]
        times += [took] if turn >= warm else []
    for number in range(step.streams):
        engine.cancel(f"stream {number}")
    while not engine.idle:
        engine.step()
    return times, tokens


def submit(engine: Engine, name: str, length: int, new: int, seed: int) -> None:
    """Submit a request with a prompt that shares no prefix with those of other seeds."""
    size = engine._runner.model.vocab_size - 2  # noqa: SLF001 -- tokens must be among the model's
    ids = tuple(1 + (31 * seed + 13 * place * (1 + seed % 7)) % size for place in range(length))
    params = SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
    engine.submit(Request(id=name, token_ids=ids, params=params))
