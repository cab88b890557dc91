"""The speed of the engine on the GPU: tokens per second and time to first token, compared with transformers.

Greedy decoding in bfloat16 with random weights in the shapes of SmolLM2-135M and Llama 3 8B: prompts of 128 tokens, 64
new tokens each, the end token ignored. transformers generates with the same batch size. Each row is one system, model
and batch size; a failure is a row with the reason.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import bare
import torch

bare.make_known()

from attn_engine import Request, build_engine  # noqa: E402 -- which finds what has just been made known
from attn_engine.graphs import DECODE  # noqa: E402
from attn_models.decoder.decoder import Decoder  # noqa: E402
from attn_models.quantization.quantize import join_projections  # noqa: E402
from attn_schema import EngineConfig, SamplingParams  # noqa: E402
from attn_schema.decoder import DecoderConfig  # noqa: E402
from timing import copied_per_second  # noqa: E402

LLAMA: dict[str, Any] = {
    "mechanism": "gqa",
    "norm": "rms",
    "feed_forward": "swiglu",
    "positions": "rotary",
    "max_seq_len": 2048,
}
SHAPES: dict[str, dict[str, Any]] = {
    "135M": {
        "vocab_size": 49152, "hidden_size": 576, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3,
        "intermediate_size": 1536, "tie_word_embeddings": True,
    },
    "8B": {
        "vocab_size": 128256, "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
        "intermediate_size": 14336, "tie_word_embeddings": False, "rope_theta": 500000.0,
    },
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
BATCHES = {"135M": (1, 8, 64, 256), "8B": (1, 8, 64)}
PROMPT, NEW, REPEATS = 128, 64, 3


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """One row for each system, model and batch size, and a breakdown of the time of a step."""
    for name, shape in ({"tiny": TINY} if small else SHAPES).items():
        model = random_model(shape, device)
        batches = (1, 3) if small else BATCHES[name]
        for batch in batches:
            yield {"case": f"{name}, batch {batch}", "system": "attn", **attempt(ours, model, batch, device)}
        yield {"case": f"{name}, a step at batch {batches[-1]}", **attempt(a_step, model, batches[-1], device)}
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
        for batch in batches:
            found = attempt(theirs, shape, batch, device)
            yield {"case": f"{name}, batch {batch}", "system": "transformers", **found}


def attempt(measure: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """The result of a measurement, or the reason why it failed."""
    try:
        return measure(*given)
    except Exception as error:  # noqa: BLE001 -- whatever it is, other rows are measured
        return {"refused": f"{type(error).__name__}: {error}"[:500]}


def random_model(shape: dict[str, Any], device: str) -> Decoder:
    """A decoder of this shape with random weights, created on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = Decoder(DecoderConfig.from_plain(LLAMA | shape)).eval().requires_grad_(requires_grad=False)
            if device == "cuda":
                # As in `load_model`.
                join_projections(model)
            return model
    finally:
        torch.set_default_dtype(before)


def engine_of(model: Decoder, batch: int) -> Any:
    """An engine for `batch` requests, with its decode steps captured as CUDA graphs, as after loading a model."""
    config = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=8192)
    engine = build_engine(model, None, config, kv_cache_tokens=batch * (PROMPT + NEW + 32))
    engine.warm_up()
    return engine


def submit(engine: Any, model: Decoder, batch: int, new: int, turn: int = 0) -> None:
    """Submit `batch` requests to an engine; their prompts share no prefix with those of other turns."""
    for row in range(batch):
        ids = tuple(1 + (7 * row + 13 * i + 5 * turn) % (model.vocab_size - 2) for i in range(PROMPT))
        params = SamplingParams(max_new_tokens=new, temperature=0, ignore_eos=True)
        engine.submit(Request(id=str(row), token_ids=ids, params=params))


def run(engine: Any, batch: int) -> tuple[float, float, int]:
    """Run until idle; returns the seconds until all requests have a token, the total seconds, and the token count."""
    began, first, tokens = time.perf_counter(), 0.0, 0
    while not engine.idle:
        tokens += sum(len(output.delta.tokens) for output in engine.step())
        if not first and tokens >= batch:
            first = time.perf_counter() - began
    return first, time.perf_counter() - began, tokens


def ours(model: Decoder, batch: int, device: str) -> dict[str, Any]:
    """The medians of attn's engine."""
    engine = engine_of(model, batch)
    found = []
    for turn in range(1 + (REPEATS if device == "cuda" else 1)):
        submit(engine, model, batch, NEW if turn else 4, turn)
        found.append(run(engine, batch))
    first, whole = (statistics.median(times) for times in list(zip(*found[1:], strict=True))[:2])
    row = said(batch, first, whole, found[-1][2])
    shared = model.unembedding is None
    weights = sum(weight.nbytes for weight in model.parameters()) - (0 if shared else model.embedding.weight.nbytes)
    config = model.config
    width = 2 * (config.num_kv_heads or config.num_heads) * config.hidden_size // config.num_heads
    states = width * config.num_layers * model.embedding.weight.itemsize * batch * (PROMPT + NEW / 2)
    share = (weights + states) / (row["ms_per_step"] / 1e3) / copied_per_second(device)
    return {**row, "share_of_copy": share, "eager_reason": engine.eager_reasons.get(DECODE)}


def said(batch: int, first: float, whole: float, tokens: int) -> dict[str, Any]:
    """The values of a row."""
    return {
        "tokens_per_second": round(tokens / whole, 1),
        "first_token_ms": round(1e3 * first, 2),
        "ms_per_step": round(1e3 * (whole - first) / max(1, tokens // batch - 1), 3),
        "tokens": tokens,
    }


def a_step(model: Decoder, batch: int, device: str) -> dict[str, Any]:
    """The kernels that one decode step launches on the GPU, and the time of the kernels alone."""
    engine = engine_of(model, batch)
    submit(engine, model, batch, NEW)
    for _ in range(8):
        engine.step()
    if device != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine.step()
        torch.cuda.synchronize()
    events = profile.key_averages()
    busy = sum(event.self_device_time_total for event in events)
    kernels = [event for event in events if event.self_device_time_total and event.device_type.name == "CUDA"]
    counted = {name: event.count for event in events for name in ASKED if event.key == name}
    worst = sorted(kernels, key=lambda event: -event.self_device_time_total)[:12]
    return {
        "gpu_ms": round(busy / 1e3, 3),
        "kernels": sum(event.count for event in kernels),
        "calls": counted,
        "longest": {event.key[:60]: [event.count, round(event.self_device_time_total / 1e3, 3)] for event in worst},
    }


ASKED = ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaGraphLaunch")


def theirs(shape: dict[str, Any], batch: int, device: str) -> dict[str, Any]:
    """The medians of transformers' `generate`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    kept = {key: value for key, value in shape.items() if not key.startswith("num_") and key != "rope_theta"}
    config = LlamaConfig(
        **kept,
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()  # noqa: SLF001 -- the way to a dtype
    ids = torch.randint(1, shape["vocab_size"] - 2, (batch, PROMPT), device=device)

    def generated(new: int) -> float:
        began = time.perf_counter()
        given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), **given)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    generated(2)
    times = REPEATS - 1 if device == "cuda" else 1
    first, whole = (statistics.median(generated(new) for _ in range(times)) for new in (1, NEW))
    return said(batch, first, whole, batch * NEW)
